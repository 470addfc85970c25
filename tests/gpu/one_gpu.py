"""A batch of random tokens, and the difference from transformers' log-probs, for the tests of engines on one GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part


def make_batch(vocabulary: int) -> DataProto:
    """Return eight sequences for an update of two minibatches; token 0, which may end a sequence, is not among them."""
    generator = torch.Generator().manual_seed(5)

    def tokens(length: int) -> list[int]:
        return torch.randint(1, vocabulary, (length,), generator=generator).tolist()

    tensors = rollout_batch([tokens(20 + row) for row in range(8)], [tokens(30 - row) for row in range(8)])
    mask = tensors[Keys.RESPONSE_MASK]
    tensors[Keys.ADVANTAGES] = mask.unpadded(torch.randn(mask.padded().shape, generator=generator))
    return DataProto.from_dict(
        tensors, meta_info={"temperature": 1.0, "num_mini_batches": 2, "epochs": 1, "response_length": 30}
    )


def difference_from_transformers(engine: FSDPEngine, path: Path, batch: DataProto) -> float:
    """Return the mean absolute difference of an engine's log-probs from those of the model in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    computed = engine.forward(batch).padded(Keys.OLD_LOG_PROBS)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(**padded_inputs(batch)).logits
    responses, mask = padded_responses(batch), batch.padded(Keys.RESPONSE_MASK)
    log_p = torch.log_softmax(response_part(logits, responses.shape[1]), dim=-1)
    expected = log_p.gather(-1, responses.unsqueeze(-1)).squeeze(-1) * mask
    assert expected[mask.bool()].std() > 0.5, "the model has no contrast, so equal log-probs would show nothing"
    return float((computed - expected).abs().sum() / mask.sum())
