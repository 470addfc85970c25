"""A batch of random tokens, and differences from transformers' log-probs, for the tests of engines on one GPU."""

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
    computed, mask = engine.forward(batch).padded(Keys.OLD_LOG_PROBS), batch.padded(Keys.RESPONSE_MASK)
    return float((computed - _log_probs_of_transformers(path, batch, torch.float32)).abs().sum() / mask.sum())


def rounding_of_transformers(path: Path, batch: DataProto) -> float:
    """Return the mean absolute difference of transformers' log-probs in bfloat16 from those in float32, on the CPU."""
    exact, rounded = (_log_probs_of_transformers(path, batch, dtype) for dtype in (torch.float32, torch.bfloat16))
    return float((rounded - exact).abs().sum() / batch.padded(Keys.RESPONSE_MASK).sum())


def _log_probs_of_transformers(path: Path, batch: DataProto, dtype: torch.dtype) -> torch.Tensor:
    """Return the log-probs of the responses, (rows, response length), float32, 0 after their ends."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    with torch.no_grad():
        logits = model(**padded_inputs(batch)).logits.float()
    responses, mask = padded_responses(batch), batch.padded(Keys.RESPONSE_MASK)
    log_p = torch.log_softmax(response_part(logits, responses.shape[1]), dim=-1)
    log_probs = log_p.gather(-1, responses.unsqueeze(-1)).squeeze(-1) * mask
    assert log_probs[mask.bool()].std() > 0.5, "the model has no contrast, so equal log-probs would show nothing"
    return log_probs
