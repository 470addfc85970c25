"""Measures workload W in several placements and schedules, one after the other on this machine, and prints ratios.

    python -m tests.bench.bench_split --output DIR [--gpus 2] [--shape 0.5B] [--layouts split-overlapped,colocated]

Every layout is a real `ppojob run` in processes of its own. The figures are medians over the steps after the warm-up.
Beside each phase stands its floor: its model operations at the device's peak, its bytes at the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from tests.bench import workload
from tests.bench.floors import floors

WARM_UP_STEPS = 3
PHASES = ("gen", "old_log_prob", "values", "ref", "reward", "adv", "update_critic", "update_actor", "update_weights")
RUN_LIMIT_S = 900.0


@dataclass(frozen=True)
class Result:
    """One layout's medians, in seconds, and when its first step was done."""

    name: str
    first_step_s: float
    metrics: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.metrics["timing_s/step"]


def layouts(num_gpus: int) -> dict[str, dict[str, Any]]:
    """Return the layouts that make sense on so many GPUs."""
    actor = (num_gpus + 1) // 2

    def split(mode: str, actor_gpus: int = actor) -> dict[str, Any]:
        pools = [
            {"name": "actor", "gpusPerNode": actor_gpus},
            {"name": "critic", "gpusPerNode": num_gpus - actor_gpus},
        ]
        placement = {"actor": "actor", "rollout": "actor", "critic": "critic", "ref": "critic", "reward": "critic"}
        return {"pools": _with_resources(pools), "placement": placement, "schedule": {"mode": mode}}

    found = {"colocated": {"pools": _with_resources([{"name": "all", "gpusPerNode": num_gpus}])}}
    found["colocated"] |= {"placement": {"actor": "all"}, "schedule": {"mode": "Serial"}}
    if num_gpus > 1:
        found |= {
            "split-serial": split("Serial"),
            "split-parallel-update": split("ParallelUpdate"),
            "split-overlapped": split("Overlapped"),
        }
    return found


def _with_resources(pools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**pool, "resourcesPerGPU": {"cpu": 8, "memory": "48Gi", "shm": "8Gi"}} for pool in pools]


def measure(name: str, job: Mapping[str, Any], folder: Path) -> Result:
    """Run one layout to its end.

    Raises:
        RuntimeError: it failed; the message says where its log is.
    """
    folder.mkdir(parents=True)
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(dict(job)), encoding="utf-8")
    log = folder / "log.txt"
    program = "from ppojob_trainer.cli import main; main()"
    command = [sys.executable, "-c", program, "run", str(file), "--output", str(folder / "run")]
    started = time.time()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(RUN_LIMIT_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    if code != 0:
        raise RuntimeError(f"layout {name} ended with {code}: see {log}\n{log.read_text(encoding='utf-8')[-3000:]}")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row.get("step", 0) > WARM_UP_STEPS]
    first = next(row for row in rows if row.get("step", 0) == 1)
    names = sorted({key for row in steps for key, value in row.items() if isinstance(value, float)})
    medians = {key: statistics.median(row[key] for row in steps if key in row) for key in names}
    return Result(name, first["time"] - started, medians)


def show(results: list[Result], size: workload.Size, gpus_of_roles: Mapping[str, int], console: Console) -> None:
    """Print the table: seconds of each phase, and each layout's ratio to the first."""
    table = Table(title=f"workload W, {size.shape}: seconds, medians after {WARM_UP_STEPS} steps")
    table.add_column("")
    limits = floors(workload.SHAPES[size.shape], size, gpus_of_roles)
    for result in results:
        table.add_column(result.name, justify="right")
    if limits:
        table.add_column("floor (split)", justify="right")
    for phase in PHASES:
        cells = [f"{result.metrics.get(f'timing_s/{phase}', float('nan')):.3f}" for result in results]
        table.add_row(phase, *cells, *([f"{limits[phase]:.3f}" if phase in limits else ""] if limits else []))
    table.add_section()
    table.add_row("step", *(f"{result.step_s:.3f}" for result in results))
    table.add_row(f"ratio to {results[0].name}", *(f"{result.step_s / results[0].step_s:.3f}" for result in results))
    table.add_row("start to first step", *(f"{result.first_step_s:.1f}" for result in results))
    extra = sorted(
        {key for result in results for key in result.metrics if key.startswith(("pool/", "perf/", "overlap/"))}
    )
    for key in extra:
        table.add_row(key, *(f"{result.metrics.get(key, float('nan')):.4g}" for result in results))
    console.print(table)


def main() -> None:
    """Measure, print, and write `results.json` and the picture of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder for model and prompts (default: in the output)")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(workload.SHAPES), default="0.5B")
    parser.add_argument("--layouts", help="comma-separated; default: all")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--set", action="append", default=[], help="section.field=YAML value, for every layout")
    arguments = parser.parse_args()
    tiny = arguments.shape == "tiny"
    size = workload.Size("tiny", 8, 16, 16, 512) if tiny else workload.Size(arguments.shape)
    output: Path = arguments.output.absolute()
    data = (arguments.data or output / "workload").absolute()
    data.mkdir(parents=True, exist_ok=True)
    workload.prepare(data, size, arguments.steps)
    known = layouts(arguments.gpus)
    names = arguments.layouts.split(",") if arguments.layouts else list(known)
    console = Console(width=150)
    results: list[Result] = []
    for name in names:
        job = workload.job(data, size, known[name], arguments.steps, arguments.device)
        for setting in arguments.set:
            _set(job["spec"], *setting.split("=", 1))
        results.append(measure(name, job, output / name))
        console.print(f"{name}: {results[-1].step_s:.3f} s a step")
    actor_gpus = (arguments.gpus + 1) // 2
    critic_gpus = max(1, arguments.gpus - actor_gpus)
    show(results, size, {"actor": actor_gpus, "critic": critic_gpus, "ref": critic_gpus}, console)
    rows = [{"name": r.name, "first_step_s": r.first_step_s, **r.metrics} for r in results]
    (output / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _set(spec: dict[str, Any], path: str, value: str) -> None:
    *parents, last = path.split(".")
    for part in parents:
        spec = spec.setdefault(part, {})
    spec[last] = yaml.safe_load(value)


if __name__ == "__main__":
    main()
