"""One of two processes that update a policy in several layouts and write their times as JSON.

`python -m tests.bench.parallel_updates RANK DEVICE MODEL OUT ROWS TOKENS MICRO_BATCHES UPDATES PROFILE ADAPTERS
NAME:PORT...`. PROFILE 1: one more update of each layout runs under torch's profiler. ADAPTERS 1: LoRA on the attention
is trained, and nothing else. Started by `bench_parallel`; CUDA_VISIBLE_DEVICES names the GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import profiler
from torch.profiler import ProfilerActivity

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.protocol import DataProto
from tests.bench.bench_checkpoint import make_batch, seconds_of
from tests.gpu.one_layout import in_layout
from tests.unit.trainer.engines.fsdp_engines import policy_engine


@dataclass(frozen=True)
class Compared:
    """One layout. micro_batches: as a multiple of those that a pipeline has."""

    dims: ParallelDims
    is_compiled: bool = True
    micro_batches: float = 1


LAYOUTS: Final[Mapping[str, Compared]] = {
    "data-2": Compared(ParallelDims(shard=2)),
    "tensor-2": Compared(ParallelDims(tensor=2)),
    # Each rank has as many micro-batches as with data-2.
    "tensor-2-large-passes": Compared(ParallelDims(tensor=2), micro_batches=0.5),
    "pipeline-2": Compared(ParallelDims(pipeline=2)),
    "pipeline-2-interleaved": Compared(ParallelDims(pipeline=2, virtual=2)),
    "sequence-2": Compared(ParallelDims(sequence=2)),
    "experts-2": Compared(ParallelDims(shard=2, expert=2)),
    "data-2-eager": Compared(ParallelDims(shard=2), is_compiled=False),
    "tensor-2-eager": Compared(ParallelDims(tensor=2), is_compiled=False),
    "pipeline-2-eager": Compared(ParallelDims(pipeline=2), is_compiled=False),
    "pipeline-2-interleaved-eager": Compared(ParallelDims(pipeline=2, virtual=2), is_compiled=False),
}
# A quarter of each sequence is prompt.
_PROMPT_SHARE, _WARM_UP = 4, 2
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def measure(
    parallel: ParallelMesh,
    model: Path,
    batch: DataProto,
    max_tokens: int,
    updates: int,
    *,
    is_compiled: bool,
    has_adapters: bool = False,
    profile: Path | None = None,
) -> dict[str, Any]:
    """Return seconds of each update after two, the peak of this GPU's memory in GB, MFU and the first gradient norm.

    Args:
        profile: file for the kernels and operations of one more update, those with the most time first. Its Chrome
            trace goes beside it, as `.json.gz`.
    """
    has_gpu = parallel.device.type == "cuda"
    engine = policy_engine(
        parallel,
        ActorModel(
            path=str(model),
            compile=is_compiled and has_gpu,
            lora=LoRA(rank=16, target_modules=list(_ATTENTION)) if has_adapters else None,
        ),
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
    if profile is not None:
        _write_profile(lambda: engine.update(batch), profile, has_gpu=has_gpu)
    return {
        "seconds": seconds,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if has_gpu else 0.0,
        "mfu": last.get("perf/mfu/actor", 0.0),
        "grad_norm": first["actor/grad_norm"],
    }


def _write_profile(work: Callable[[], object], file: Path, *, has_gpu: bool) -> None:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with profiler.profile(activities=activities) as found:
        work()
        if has_gpu:
            torch.cuda.synchronize()
    orders = ["self_cuda_time_total", "self_cpu_time_total"] if has_gpu else ["self_cpu_time_total"]
    averages = found.key_averages()
    tables = [averages.table(sort_by=order, row_limit=25, max_name_column_width=90) for order in orders]
    file.write_text("\n".join(tables), encoding="utf-8")
    found.export_chrome_trace(str(file.with_suffix(".json.gz")))


def main() -> None:
    """Measure this rank's part of every layout."""
    rank, device, model, out = int(sys.argv[1]), Device(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    rows, tokens, micro_batches, updates, is_profiled, has_adapters = map(int, sys.argv[5:11])
    found: dict[str, Any] = {}
    for argument in sys.argv[11:]:
        name, port = argument.split(":")
        compared = LAYOUTS[name]
        dims = compared.dims
        prompt = tokens // _PROMPT_SHARE
        batch = make_batch(rows, prompt, tokens - prompt, num_minibatches=1)
        shard = batch.split(rows // dims.num_shards)[dims.shard_of(rank)]
        # The engine multiplies it by the sequence-parallel ranks, which compute a slice of a micro-batch each.
        max_tokens = int(rows * tokens / (micro_batches * compared.micro_batches)) // dims.sequence
        torch.compiler.reset()
        if device is Device.CUDA:
            torch.cuda.reset_peak_memory_stats()
        work = partial(
            measure,
            model=model,
            batch=shard,
            max_tokens=max_tokens,
            updates=updates,
            is_compiled=compared.is_compiled,
            has_adapters=bool(has_adapters),
            profile=out / f"profile-{name}-{rank}.txt" if is_profiled else None,
        )
        found[name] = in_layout(device, rank, dims, int(port), work, limit_s=300)
        (out / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
