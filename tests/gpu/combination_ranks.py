"""One rank of the table of combinations: compile x gradient checkpointing x offload x LoRA x division of the model.

`python -m tests.gpu.combination_ranks RANK DEVICE MODEL OUT DIVISION TRAINED PORT`; CUDA_VISIBLE_DEVICES names the GPU.
Each combination of the division that trains so (TRAINED) loads a small random model, makes two updates and writes what
it computed as JSON, or the error. `test_combinations_on_cuda` starts two of them for each pair and compares.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA, Offload
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.network import connect
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from tests.unit.trainer.engines.fsdp_engines import policy_engine

VOCABULARY, NUM_SEQUENCES, NUM_UPDATES = 512, 16, 2


@dataclass(frozen=True)
class Division:
    """How the ranks divide the work; `stays_gathered` as of `FSDPEngine`."""

    dims: ParallelDims = field(default_factory=ParallelDims)
    stays_gathered: bool = False


DIVISIONS = {
    "one rank": Division(),
    "FSDP 2": Division(ParallelDims(shard=2)),
    "FSDP 2, gathered": Division(ParallelDims(shard=2), stays_gathered=True),
    "sequence 2": Division(ParallelDims(sequence=2)),
    "sequence 2, gathered": Division(ParallelDims(sequence=2), stays_gathered=True),
    "context 2": Division(ParallelDims(context=2)),
    "tensor 2": Division(ParallelDims(tensor=2)),
    "pipeline 2": Division(ParallelDims(pipeline=2)),
}
OFFLOADS: dict[str, dict[str, Any]] = {
    "nothing offloaded": {},
    "states offloaded": {"offload": Offload(parameters=True, optimizer=True)},
    "activations offloaded": {"activation_offload": True},
}
TRAINED: dict[str, dict[str, Any]] = {"all weights": {}, "LoRA": {"lora": LoRA(rank=8, alpha=16.0)}}


@dataclass(frozen=True)
class Combination:
    """One row of the table."""

    division: str
    compile: bool
    checkpointing: bool
    offload: str
    trained: str

    @property
    def name(self) -> str:
        """What the table prints."""
        words = [
            self.division,
            "compiled" if self.compile else "eager",
            "checkpointing" if self.checkpointing else "no checkpointing",
            self.offload,
            self.trained,
        ]
        return ", ".join(words)

    @property
    def model(self) -> dict[str, Any]:
        """The settings of `ActorModel`."""
        return {
            "compile": self.compile,
            "gradient_checkpointing": self.checkpointing,
            **OFFLOADS[self.offload],
            **TRAINED[self.trained],
        }


def combinations_of(name: str, trained: str) -> Iterator[Combination]:
    """Yield the rows of one division. What stays gathered changes nothing in how a layer is offloaded."""
    either = (False, True)
    offloads = list(OFFLOADS)[:1] if DIVISIONS[name].stays_gathered else list(OFFLOADS)
    for compiled, checkpointing, offload in itertools.product(either, either, offloads):
        yield Combination(name, compiled, checkpointing, offload, trained)


PARTS = list(itertools.product(DIVISIONS, TRAINED))
"""Each is computed by ranks of its own."""
COMBINATIONS = [combination for part in PARTS for combination in combinations_of(*part)]


def write_model(folder: Path) -> Path:
    """Write a random Llama of four layers whose distributions are far from uniform."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch() -> DataProto:
    """Prompts and responses of different lengths, with advantages."""
    generator = torch.Generator().manual_seed(5)

    def tokens(length: int) -> list[int]:
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    rows = range(NUM_SEQUENCES)
    tensors = rollout_batch([tokens(12 + row) for row in rows], [tokens(60 - 2 * row) for row in rows])
    mask = tensors[Keys.RESPONSE_MASK]
    tensors[Keys.ADVANTAGES] = mask.unpadded(torch.randn(mask.padded().shape, generator=generator))
    meta = {"temperature": 1.0, "num_mini_batches": 1, "epochs": 1, "response_length": 60}
    return DataProto.from_dict(tensors, meta_info=meta)


def run(parallel: ParallelMesh, model: Path, combination: Combination) -> dict[str, Any]:
    """Return what two updates of one combination compute; log-probs are those of the rank's first sequences."""
    division = DIVISIONS[combination.division]
    dims = division.dims
    batch = make_batch().split(NUM_SEQUENCES // dims.num_shards)[dims.shard_of(parallel.rank)]
    training = ActorSpec(learning_rate=1e-3, max_tokens_per_gpu=256)
    engine = policy_engine(
        parallel,
        ActorModel(path=str(model), **combination.model),
        training,
        AlgorithmSpec(),
        total_steps=10,
        stays_gathered=division.stays_gathered,
    )
    started = time.perf_counter()
    old = engine.forward(batch)
    norms = [engine.update(batch.with_fields(old.columns))["actor/grad_norm"] for _ in range(NUM_UPDATES)]
    log_probs = engine.forward(batch).padded(Keys.OLD_LOG_PROBS, 60)
    return {
        "grad_norms": norms,
        "before": old.padded(Keys.OLD_LOG_PROBS, 60)[:4].flatten().tolist(),
        "after": log_probs[:4].flatten().tolist(),
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Run this rank's share of every combination of a part."""
    rank, device, model, out = int(sys.argv[1]), Device(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    name, trained, port = sys.argv[5], sys.argv[6], int(sys.argv[7])
    dims = DIVISIONS[name].dims
    if rank >= dims.world_size:
        return
    found: dict[str, Any] = {}
    parallel = init_process_group(device, rank, dims, connect("127.0.0.1", port, 120), 120)
    for combination in combinations_of(name, trained):
        torch.compiler.reset()
        try:
            found[combination.name] = run(parallel, model, combination)
        except Exception:  # noqa: BLE001 - the other rows are wanted all the same; the test fails on this one
            found[combination.name] = {"error": traceback.format_exc()}
        # One line each, so that a run which is cut off shows how far it came.
        outcome = "failed" if "error" in found[combination.name] else "ok"
        sys.stdout.write(f"rank {rank}: {combination.name}: {outcome}\n")
        sys.stdout.flush()
        gc.collect()
    parallel.destroy()
    (out / f"{name}, {trained}, rank {rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
