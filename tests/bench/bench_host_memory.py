"""Trains workload W for a few steps, saves, exports, and resumes in a second process; says what the host's memory was.

    python -m tests.bench.bench_host_memory --output DIR [--data DIR] [--shape 7B] [--layers N] [--critic lora]
        [--steps 3] [--part first|second|both] [--set section.field=VALUE]

All roles are in one pool of all GPUs, optimizers are offloaded and layers compiled. Both parts are `ppojob run`s of the
same folder. The second part resumes from the checkpoint, trains one step and is then killed, because a disk may have no
room for a second checkpoint: of 7 B parameters one model's is 91 GB. A critic with adapters needs next to none.
What is printed: the most memory that was used in each phase, the processes at that time, the steps, and whether the
export has the checkpoint's weights. The samples are in DIR/first and DIR/second (`host_memory`).
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from ppojob_trainer.telemetry.trace import read_trace
from tests.bench import host_memory, workload
from tests.bench.layouts import layout
from tests.bench.whole_run import run_job, steps_of

CRITICS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"model": {"critic": {"lora": {"rank": 16}}}},
    "none": {"algorithm": {"advantageEstimator": "GRPO"}},
}
_GB = 1e9
# A model of 7 B parameters is loaded, saved, exported and read again.
_LIMIT_S = 7200.0
_SAMPLES = 4
# More than are ever trained, so that no last save comes before the kill.
_MANY_STEPS = 1000


def main() -> None:
    """Run the parts that are asked for."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    output: Path = arguments.output.absolute()
    data = (arguments.data or output / "workload").absolute()
    data.mkdir(parents=True, exist_ok=True)
    size = workload.size_of(arguments.shape)
    workload.prepare(data, size, arguments.steps + 1, layers=arguments.layers)
    job = _job(data, size, arguments)
    if arguments.part in ("first", "both"):
        job["spec"]["trainer"]["totalSteps"] = arguments.steps
        _first(job, output)
    if arguments.part in ("second", "both"):
        job["spec"]["trainer"]["totalSteps"] = _MANY_STEPS
        _second(job, output, arguments.steps + 1)


def _first(job: dict[str, Any], output: Path) -> None:
    """Train, save and export; compare the export with the checkpoint."""
    _run(job, output, "first")
    num_compared = compare_export(output / "run" / "model", _newest_checkpoint(output / "run"))
    print(f"the export has the checkpoint's weights in bfloat16: {num_compared} tensors compared")


def _second(job: dict[str, Any], output: Path, step: int) -> None:
    """Resume, and end everything once a step is recorded."""
    _run(job, output, "second", stop_after=step)
    if step not in steps_of(output / "run"):
        sys.exit(f"the second part ended before step {step}\n{_end_of_log(output, 'second')}")


def _run(job: dict[str, Any], output: Path, part: str, stop_after: int | None = None) -> None:
    """Run a part, sample the memory meanwhile, and print what was seen."""
    folder = output / part
    folder.mkdir(parents=True, exist_ok=True)
    with host_memory.sampled(folder):
        code = run_job(job, folder, output / "run", stop_after=stop_after, limit_s=_LIMIT_S)
    _report(output, part)
    if code:
        sys.exit(f"the {part} part ended with {code}\n{_end_of_log(output, part)}")


def _report(output: Path, part: str) -> None:
    trace, folder = output / "run" / "trace.json", output / part
    found = host_memory.peaks(folder, read_trace(trace) if trace.exists() else [])
    total = host_memory.total(folder)
    print(f"{part}: host memory of {total / _GB:.1f} GB, the most that was used in each phase")
    for peak in found:
        print(f"  {peak.used / _GB:7.1f} GB  {peak.phase}")
    highest = max(found, key=lambda peak: peak.used)
    print(f"{part}: peak {highest.used / _GB:.1f} GB ({highest.used / total:.0%}) in {highest.phase}; resident then:")
    for name, rss in host_memory.largest(folder, highest.at)[:12]:
        print(f"  {rss / _GB:7.1f} GB  {name}")
    for step, row in steps_of(output / "run").items():
        shown = ("timing_s/step", "timing_s/save_checkpoint", "actor/grad_norm", "actor/pg_loss", "critic/grad_norm")
        print(f"step {step}: " + ", ".join(f"{name} {row[name]:.4g}" for name in shown if name in row))


def _end_of_log(output: Path, part: str) -> str:
    return (output / part / "log.txt").read_text(encoding="utf-8", errors="replace")[-4000:]


def _newest_checkpoint(run: Path) -> Path:
    found = sorted(run.rglob("actor/.metadata"), key=lambda file: file.stat().st_mtime)
    if not found:
        sys.exit(f"there is no checkpoint in {run}")
    return found[-1].parent


def compare_export(model: Path, checkpoint: Path) -> int:
    """Compare every exported weight with the actor's, one at a time; return their number.

    Raises:
        AssertionError: one differs, or is missing.
    """
    import torch
    from safetensors import safe_open
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    num_compared = 0
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                key = f"model.language_model.{name}"
                state: dict[str, Any] = {key: torch.empty(stored[key].size)}
                load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
                assert torch.equal(state[key].bfloat16(), tensors.get_tensor(name)), f"{name} is another"
                num_compared += 1
    trained = {key for key in stored if key.startswith("model.language_model.") and not key.endswith("lm_head.weight")}
    assert num_compared >= len(trained), f"{len(trained)} are in the checkpoint, and {num_compared} in the export"
    return num_compared


def _job(data: Path, size: workload.Size, arguments: argparse.Namespace) -> dict[str, Any]:
    sections: dict[str, Any] = {
        **layout("colocated", arguments.gpus),
        "rollout": {"sleep": True},
        "checkpoint": {"everySteps": 0, "export": "Final", "keep": 1},
    }
    job = workload.job(data, size, sections, arguments.steps, arguments.device)
    spec = job["spec"]
    is_cuda = arguments.device == "CUDA"
    for role in ("actor", "critic"):
        trained = {"offload": {"optimizer": True}, "compile": True} if is_cuda else {}
        spec["model"][role] = {**spec["model"].get(role, {}), **trained}
    for section, values in CRITICS[arguments.critic].items():
        _merge(spec.setdefault(section, {}), values)
    if arguments.critic == "none":
        del spec["model"]["critic"], spec["critic"]
        # As many responses a step as with a critic.
        spec["rollout"]["samplesPerPrompt"] = _SAMPLES
        spec["data"]["trainBatchSize"] //= _SAMPLES
        spec["actor"]["miniBatchSize"] = max(1, spec["actor"]["miniBatchSize"] // _SAMPLES)
    workload.set_fields(spec, arguments.set)
    return job


def _merge(target: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _merge(target.setdefault(name, {}), value)
        else:
            target[name] = value


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder for model and prompts (default: in the output)")
    parser.add_argument("--shape", choices=sorted(workload.SHAPES), default="7B")
    parser.add_argument("--layers", type=int, help="decoder layers (default: those of the shape)")
    parser.add_argument("--critic", choices=sorted(CRITICS), default="lora", help="none: GRPO")
    parser.add_argument("--steps", type=int, default=3, help="of the first part")
    parser.add_argument("--part", choices=("first", "second", "both"), default="both")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=("CUDA", "CPU"), default="CUDA")
    parser.add_argument("--set", action="append", default=[], help="section.field=YAML value")
    return parser.parse_args()


if __name__ == "__main__":
    main()
