"""Measures how long training stands still for a checkpoint: blocking beside background, in one run. Prints their ratio.

    python -m tests.bench.bench_checkpoint --output DIR [--shape 1.5B] [--device CUDA] [--rounds 3] [--offload]
    python -m tests.bench.bench_checkpoint --output DIR --loop [--gpus 1] [--steps 7] [--set section.field=VALUE]

Without --loop: one process and one GPU, without Ray and vLLM. An engine trains a policy of the shape. In each round it
saves once and waits; then it saves in the background and updates at once, which is the worst case: in a run, generation
and forward passes come between. Standing still are the call and what the update waits for. The two checkpoints must
hold the same numbers. As in a run, the memory for the copies is allocated from the start on; with --no-prepare, in the
first save.

With --loop: two `ppojob run`s of GRPO in one pool, with checkpoint.async false and true. Standing still are
`timing_s/save_checkpoint` of a step with a checkpoint and `timing_s/checkpoint/wait_actor` of the next one. The last
checkpoint of a run is not counted, because it is never written in the background.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import workload
from tests.bench.layouts import layout
from tests.bench.whole_run import run_job, steps_of

if TYPE_CHECKING:
    from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
    from ppojob_trainer.protocol import DataProto

WAITED = "timing_s/checkpoint/wait_actor"
SAVED = "timing_s/save_checkpoint"
_LIMIT_S = 540.0
_MINIBATCHES = 4
_SAMPLES = 4


@dataclass(frozen=True)
class Round:
    """Seconds of one round: the save that is waited for; call, wait and update of the other, and until it is written.

    plain: an update without a save.
    """

    blocking: float
    call: float
    waited: float
    update: float
    written: float
    plain: float

    @property
    def standstill(self) -> float:
        """How long the training stood still for the save in the background."""
        return self.call + self.waited


def main() -> None:
    """Measure what is asked for."""
    arguments = _arguments()
    output: Path = arguments.output.absolute()
    data = output / "workload"
    data.mkdir(parents=True, exist_ok=True)
    size = workload.size_of(arguments.shape)
    workload.prepare(data, size, arguments.steps)
    if arguments.loop:
        measure_loop(data, size, output, arguments)
    else:
        measure_engine(data / "model", size, output, arguments)


def measure_engine(model: Path, size: workload.Size, output: Path, arguments: argparse.Namespace) -> None:
    """Print the rounds, and the ratio of their medians."""
    import torch

    from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
    from ppojob_api.v1alpha1.model import ActorModel, Offload
    from ppojob_api.v1alpha1.runtime import Device
    from ppojob_api.v1alpha1.training import ActorSpec
    from ppojob_trainer.engines.network import listen
    from ppojob_trainer.engines.train.dims import ParallelDims
    from ppojob_trainer.engines.train.mesh import init_process_group
    from tests.unit.trainer.engines.fsdp_engines import policy_engine

    device = Device(arguments.device)
    parallel = init_process_group(device, 0, ParallelDims(), listen("127.0.0.1", 600), 600)
    actor = ActorModel(path=str(model), offload=Offload(optimizer=arguments.offload))
    training = ActorSpec(max_tokens_per_gpu=16_384, learning_rate=1e-5)
    dtype = torch.bfloat16 if arguments.device == "CUDA" else torch.float32
    engine = policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=1000, dtype=dtype)
    batch = make_batch(arguments.rows, size.prompt_tokens, size.response_tokens)
    if arguments.prepare:
        engine.prepare_saves()
    first = seconds_of(lambda: engine.update(batch))
    print(f"first update: {first:.2f} s; {_name(arguments)}", flush=True)
    rounds = []
    for number in range(arguments.rounds):
        folder = output / f"round-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        found = one_round(engine, batch, folder)
        print(
            f"round {number}: blocking {found.blocking:.2f} s | background: call {found.call:.3f} s, update waited "
            f"{found.waited:.3f} s, written after {found.written:.2f} s; update {found.update:.2f} s, without a save "
            f"{found.plain:.2f} s",
            flush=True,
        )
        if number == 0:
            print(f"both checkpoints hold the same {compare(folder / 'blocking', folder / 'background')} tensors")
        size_of = sum(file.stat().st_size for file in (folder / "blocking").iterdir())
        shutil.rmtree(folder)
        rounds.append(found)
    print(f"a checkpoint has {size_of / 1e9:.2f} GB")
    counted = rounds if arguments.prepare else rounds[1:] or rounds
    blocking, standstill = (statistics.median(values) for values in zip(*map(_pair, counted), strict=True))
    print(f"standstill, median: blocking {blocking:.3f} s, background {standstill:.3f} s")
    print(f"blocking : background = {blocking / standstill:.1f}")
    parallel.destroy()


def one_round(engine: FSDPEngine, batch: DataProto, folder: Path) -> Round:
    """Save the same weights in both ways, then update."""
    plain = seconds_of(lambda: engine.update(batch))
    blocking = seconds_of(lambda: engine.save(folder / "blocking"))
    start = time.perf_counter()
    call = seconds_of(lambda: engine.save(folder / "background", in_background=True))
    metrics: dict[str, float] = {}
    update = seconds_of(lambda: metrics.update(engine.update(batch)))
    while not engine.is_saved():
        if time.perf_counter() - start > _LIMIT_S:
            sys.exit("the save in the background did not end")
        time.sleep(0.05)
    return Round(blocking, call, metrics[WAITED], update, time.perf_counter() - start, plain)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds until the work is done, on the device too."""
    import torch

    _synchronize(torch)
    start = time.perf_counter()
    work()
    _synchronize(torch)
    return time.perf_counter() - start


def _synchronize(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_batch(rows: int, prompt_tokens: int, response_tokens: int, num_minibatches: int = _MINIBATCHES) -> DataProto:
    """Return random prompts and responses of these lengths, with what an update reads."""
    import torch

    from ppojob_trainer.protocol import DataProto, Keys, rollout_batch

    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> list[list[int]]:
        found: list[list[int]] = torch.randint(256, (rows, length), generator=generator).tolist()
        return found

    columns = rollout_batch(tokens(prompt_tokens), tokens(response_tokens))
    mask = columns[Keys.RESPONSE_MASK]
    for key in (Keys.OLD_LOG_PROBS, Keys.ADVANTAGES):
        columns[key] = mask.unpadded(torch.randn(rows, response_tokens, generator=generator))
    columns[Keys.OLD_LOG_PROBS] = mask.with_values(columns[Keys.OLD_LOG_PROBS].values - 12)
    meta = {
        "temperature": 1.0,
        "num_mini_batches": num_minibatches,
        "epochs": 1,
        "response_length": response_tokens,
    }
    return DataProto.from_dict(columns, meta_info=meta)


def compare(first: Path, second: Path) -> int:
    """Compare all tensors of two checkpoints, one at a time; return their number.

    Raises:
        AssertionError: one differs, or is missing.
    """
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    known = [FileSystemReader(folder).read_metadata().state_dict_metadata for folder in (first, second)]
    assert known[0].keys() == known[1].keys()
    tensors = {key: stored for key, stored in known[0].items() if isinstance(stored, TensorStorageMetadata)}
    for key, stored in tensors.items():
        loaded = []
        for folder in (first, second):
            state: dict[str, Any] = {key: torch.empty(stored.size, dtype=stored.properties.dtype)}
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
            loaded.append(state[key])
        assert torch.equal(*loaded), f"{key} is another"
    return len(tensors)


def measure_loop(data: Path, size: workload.Size, output: Path, arguments: argparse.Namespace) -> None:
    """Run the job in both ways; print each checkpoint, and the ratio of the medians."""
    found = {}
    for name, is_async in (("blocking", False), ("background", True)):
        folder = output / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        job = _job(data, size, arguments, is_async=is_async)
        if code := run_job(job, folder, folder / "run", limit_s=_LIMIT_S):
            end = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-4000:]
            sys.exit(f"the run ended with {code}\n{end}")
        steps = steps_of(folder / "run")
        shutil.rmtree(folder / "run" / "checkpoints", ignore_errors=True)
        found[name] = standstills(steps)
        print(f"{name}: {_name(arguments)}")
        for step, row in steps.items():
            names = ("timing_s/step", "timing_s/update_actor", SAVED, WAITED, "timing_s/checkpoint/write")
            shown = ", ".join(f"{name} {row[name]:.3f}" for name in names if name in row)
            print(f"  step {step}: {shown}", flush=True)
    medians = {name: statistics.median(values[1:] or values) for name, values in found.items()}
    print(f"standstill, median: blocking {medians['blocking']:.3f} s, background {medians['background']:.3f} s")
    print(f"blocking : background = {medians['blocking'] / medians['background']:.1f}")


def standstills(steps: Mapping[int, Mapping[str, Any]]) -> list[float]:
    """Return how long the loop stood still for each checkpoint but the last."""
    last = max(steps)
    saved = [step for step, row in steps.items() if SAVED in row and step != last]
    return [steps[step][SAVED] + steps[step + 1].get(WAITED, 0.0) for step in saved]


def _job(data: Path, size: workload.Size, arguments: argparse.Namespace, *, is_async: bool) -> dict[str, Any]:
    sections: dict[str, Any] = {
        **layout("colocated", arguments.gpus),
        "rollout": {"sleep": arguments.device == "CUDA", "samplesPerPrompt": _SAMPLES},
        "checkpoint": {"everySteps": 2, "export": "Never", "keep": 1, "async": is_async},
        "algorithm": {"advantageEstimator": "GRPO"},
    }
    job = workload.job(data, size, sections, arguments.steps, arguments.device)
    spec = job["spec"]
    del spec["model"]["critic"], spec["critic"]
    spec["model"]["actor"]["offload"] = {"optimizer": arguments.offload}
    # As many responses a step as without groups.
    spec["data"]["trainBatchSize"] //= _SAMPLES
    spec["actor"]["miniBatchSize"] = max(1, spec["actor"]["miniBatchSize"] // _SAMPLES)
    workload.set_fields(spec, arguments.set)
    return job


def _pair(found: Round) -> tuple[float, float]:
    return found.blocking, found.standstill


def _name(arguments: argparse.Namespace) -> str:
    return f"{arguments.shape} on {arguments.device}, optimizer {'offloaded' if arguments.offload else 'on the device'}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(workload.SHAPES), default="1.5B")
    parser.add_argument("--device", choices=("CUDA", "CPU"), default="CUDA")
    parser.add_argument("--offload", action="store_true", help="the optimizer's moments are offloaded")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64, help="sequences of an update, without --loop")
    parser.add_argument("--no-prepare", dest="prepare", action="store_false", help="the first save allocates memory")
    parser.add_argument("--loop", action="store_true", help="two complete runs instead of one engine")
    parser.add_argument("--gpus", type=int, default=1, help="with --loop")
    parser.add_argument("--steps", type=int, default=7, help="with --loop")
    parser.add_argument("--set", action="append", default=[], help="section.field=YAML value, with --loop")
    return parser.parse_args()


if __name__ == "__main__":
    main()
