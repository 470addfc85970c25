"""One of two processes that update a policy in several layouts and write their times as JSON.

`python -m tests.bench.parallel_updates RANK DEVICE MODEL OUT ROWS TOKENS MICRO_BATCHES UPDATES NAME:PORT...`. Started
by `bench_parallel`; CUDA_VISIBLE_DEVICES names the GPU.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.network import connect
from ppojob_trainer.engines.train.mesh import ParallelDims, ParallelMesh, init_process_group
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from tests.bench.bench_checkpoint import seconds_of
from tests.unit.trainer.engines.fsdp_engines import policy_engine

LAYOUTS: Final[Mapping[str, tuple[ParallelDims, bool]]] = {
    "data-2": (ParallelDims(shard=2), True),
    "tensor-2": (ParallelDims(tensor=2), True),
    "pipeline-2": (ParallelDims(pipeline=2), True),
    "sequence-2": (ParallelDims(sequence=2), True),
    "data-2-eager": (ParallelDims(shard=2), False),
    "tensor-2-eager": (ParallelDims(tensor=2), False),
    "pipeline-2-eager": (ParallelDims(pipeline=2), False),
}
"""The sizes of each layout, and whether the layers are compiled."""
_VOCABULARY, _PROMPT_SHARE, _WARM_UP = 256, 4, 2


def make_batch(rows: int, tokens: int) -> DataProto:
    """Return sequences of `tokens` random tokens, a quarter of them prompt, with what an update reads."""
    generator = torch.Generator().manual_seed(5)

    def texts(length: int) -> list[list[int]]:
        found: list[list[int]] = torch.randint(_VOCABULARY, (rows, length), generator=generator).tolist()
        return found

    prompt = tokens // _PROMPT_SHARE
    columns = rollout_batch(texts(prompt), texts(tokens - prompt))
    mask = columns[Keys.RESPONSE_MASK]
    columns[Keys.ADVANTAGES] = mask.unpadded(torch.randn(rows, tokens - prompt, generator=generator))
    meta = {"temperature": 1.0, "num_mini_batches": 1, "epochs": 1, "response_length": tokens - prompt}
    return DataProto.from_dict(columns, meta_info=meta)


def measure(
    parallel: ParallelMesh, model: Path, batch: DataProto, max_tokens: int, updates: int, *, is_compiled: bool
) -> dict[str, Any]:
    """Return seconds of each update after two, the peak of this GPU's memory in GB, MFU and the first gradient norm."""
    has_gpu = parallel.device.type == "cuda"
    engine = policy_engine(
        parallel,
        ActorModel(path=str(model), compile=is_compiled and has_gpu),
        ActorSpec(learning_rate=1e-6, max_tokens_per_gpu=max_tokens),
        AlgorithmSpec(),
        total_steps=1000,
        dtype=torch.bfloat16 if has_gpu else torch.float32,
    )
    batch = batch.with_fields(engine.forward(batch).columns)
    first = engine.update(batch)
    for _ in range(_WARM_UP - 1):
        engine.update(batch)
    last: dict[str, float] = {}
    seconds = [seconds_of(lambda: last.update(engine.update(batch))) for _ in range(updates)]
    return {
        "seconds": seconds,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if has_gpu else 0.0,
        "mfu": last.get("perf/mfu/actor", 0.0),
        "grad_norm": first["actor/grad_norm"],
    }


def main() -> None:
    """Measure this rank's part of every layout."""
    rank, device, model, out = int(sys.argv[1]), Device(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    rows, tokens, micro_batches, updates = map(int, sys.argv[5:9])
    found: dict[str, Any] = {}
    for argument in sys.argv[9:]:
        name, port = argument.split(":")
        dims, is_compiled = LAYOUTS[name]
        parallel = init_process_group(device, rank, dims, connect("127.0.0.1", int(port), 300), 300)
        batch = make_batch(rows, tokens).split(rows // dims.num_shards)[dims.shard_of(rank)]
        # Each sequence of tokens is worked on by one rank, or by all ranks that share it.
        max_tokens = rows * tokens // micro_batches // dims.sequence
        torch.compiler.reset()
        if device is Device.CUDA:
            torch.cuda.reset_peak_memory_stats()
        try:
            found[name] = measure(parallel, model, batch, max_tokens, updates, is_compiled=is_compiled)
        except Exception:  # noqa: BLE001 - the other layouts are worth their figures
            found[name] = {"error": traceback.format_exc()}
        (out / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        parallel.destroy()
        gc.collect()
        if device is Device.CUDA:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
