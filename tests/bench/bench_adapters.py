"""Measures what bfloat16 leaves of small adapters, in the trainer and in the weights that an engine gets.

    python -m tests.bench.bench_adapters --output DIR [--shape 0.5B] [--device CUDA]

A model with random weights takes one step of AdamW with adapters on all linear layers, which changes each number of B
by the learning rate. Then the log-probs of random tokens are computed in bfloat16 and compared with those of float32:
by the trainer, and by transformers with the weights that a push sends. Differences are standard deviations in nats.
`change` is what the step changed, in float32, and `rounding` is the difference of the model without adapters. A program
that keeps all of a small adapter has a difference of about `rounding`, and one that loses it has that of both together.
`nearest` is a push whose merged weights become the nearest numbers that bfloat16 has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from tests.bench import workload
from tests.unit.trainer.engines.fsdp_engines import policy_engine
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part

LEARNING_RATES: Final = (1e-6, 1e-5, 1e-4)
COLUMNS: Final = ("change", "rounding", "trainer", "pushed", "nearest")
CONTRAST: Final = 5.0


def main() -> None:
    """Measure, print, and write `adapters.json`."""
    arguments = _arguments()
    output: Path = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    size = replace(workload.size_of(arguments.shape), num_prompts=4, contrast=CONTRAST)
    workload.prepare(output / "workload", size, 1)
    parallel = init_process_group(Device(arguments.device), 0, ParallelDims(), listen("127.0.0.1", 60), 600)
    try:
        batch = _batch(size.vocabulary, arguments.rows, arguments.tokens)
        rows = {rate: measure(parallel, output / "workload" / "model", batch, rate) for rate in LEARNING_RATES}
    finally:
        parallel.destroy()
    Console(width=arguments.width).print(table(rows, f"{arguments.shape}, {arguments.device}: differences in nats"))
    (output / "adapters.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def measure(parallel: ParallelMesh, path: Path, batch: DataProto, learning_rate: float) -> dict[str, float]:
    """Return the columns for one learning rate."""
    actor = ActorModel(path=str(path), lora=LoRA(), gradient_checkpointing=True)
    training = ActorSpec(learning_rate=learning_rate, max_tokens_per_gpu=len(batch) * 4096)
    engine = policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=2, seed=1, dtype=torch.bfloat16)
    before = _weights(engine, torch.float32)
    engine.update(batch.with_fields(engine.forward(batch).columns))
    exact, pushed = _weights(engine, torch.float32), _weights(engine, torch.bfloat16)
    trainer = engine.forward(batch).padded(Keys.OLD_LOG_PROBS)
    del engine
    nearest = {name: weight.bfloat16() for name, weight in exact.items()}
    base, right = (_log_probs(path, batch, weights, torch.float32, parallel.device) for weights in (before, exact))
    rounded, by_push, by_nearest = (
        _log_probs(path, batch, weights, torch.bfloat16, parallel.device) for weights in (before, pushed, nearest)
    )
    found = (right - base, rounded - base, trainer - right, by_push - right, by_nearest - right)
    mask = batch.padded(Keys.RESPONSE_MASK).bool()
    return {column: float(one[mask].std()) for column, one in zip(COLUMNS, found, strict=True)}


def table(rows: Mapping[float, Mapping[str, float]], title: str) -> Table:
    """Return a row for each learning rate."""
    shown = Table(title=title)
    for column in ("learning rate", *COLUMNS):
        shown.add_column(column, justify="right")
    for rate, row in rows.items():
        shown.add_row(f"{rate:.0e}", *(f"{row[column]:.4f}" for column in COLUMNS))
    return shown


def _weights(engine: FSDPEngine, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the merged weights as a push in this dtype sends them, on the host."""
    weights = ShardedWeights(engine.module.language_model, dtype)
    return {spec.name: tensor.cpu() for spec, tensor in zip(weights.specs(), weights.gather(), strict=True)}


def _log_probs(
    path: Path, batch: DataProto, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the log-probs of the responses by transformers, [rows, tokens]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    # Tied weights are missing; of a mixture, experts would be unexpected.
    if unexpected := model.load_state_dict(weights, strict=False).unexpected_keys:
        raise ValueError(f"the model does not have {unexpected[:2]}: take a --shape without experts")
    model.to(device)
    responses = padded_responses(batch)
    with torch.no_grad():
        logits = model(**{name: tensor.to(device) for name, tensor in padded_inputs(batch).items()}).logits.cpu()
    log_p = response_part(logits, responses.shape[1]).float().log_softmax(-1)
    return log_p.gather(-1, responses.unsqueeze(-1)).squeeze(-1)


def _batch(vocabulary: int, rows: int, tokens: int) -> DataProto:
    generator = torch.Generator().manual_seed(5)

    def drawn(length: int) -> list[int]:
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    tensors = rollout_batch([drawn(16) for _ in range(rows)], [drawn(tokens) for _ in range(rows)])
    mask = tensors[Keys.RESPONSE_MASK]
    advantages = torch.tensor([1.0, -1.0]).repeat(rows // 2)[:, None].expand(rows, tokens)
    tensors[Keys.ADVANTAGES] = mask.unpadded(advantages.contiguous())
    meta = {"temperature": 1.0, "num_mini_batches": 1, "epochs": 1, "response_length": tokens}
    return DataProto.from_dict(tensors, meta_info=meta)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(workload.SHAPES), default="0.5B")
    parser.add_argument("--rows", type=int, default=4, help="sequences, an even number")
    parser.add_argument("--tokens", type=int, default=100, help="of a response")
    parser.add_argument("--device", choices=("CUDA", "CPU"), default="CUDA")
    parser.add_argument("--width", type=int, default=100, help="of the table, in letters")
    arguments = parser.parse_args()
    if arguments.rows < 2 or arguments.rows % 2:
        parser.error(f"--rows {arguments.rows}: half of the sequences get a positive advantage, so give an even number")
    return arguments


if __name__ == "__main__":
    main()
