"""One layout's run: started as a separate process, read from its files. Called by `bench_split`."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.controller.layout import layout_of
from ppojob_trainer.controller.phases import Phase, busy_seconds
from ppojob_trainer.controller.step_time import Layout, is_of_step
from ppojob_trainer.telemetry.trace import Span, read_trace
from tests.bench.whole_run import run_job, steps_of

WARM_UP_STEPS = 3
_TIMING = "timing_s/"


@dataclass(frozen=True)
class Run:
    """A run, ours or a peer's: the metrics of its steps after the warm-up, under our names, which are verl's.

    first_step_s: from the start of the process to the end of the first step.
    """

    name: str
    first_step_s: float
    steps: Sequence[Mapping[str, float]]

    @property
    def metrics(self) -> dict[str, float]:
        """The median of each metric."""
        names = sorted({name for step in self.steps for name in step})
        return {name: statistics.median(step[name] for step in self.steps if name in step) for name in names}

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.metrics["timing_s/step"]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all steps per second and GPU; None if the run does not say so.

        Responses of varied lengths give two runs different tokens, so this compares them, and not the step's seconds.
        """
        steps = [step for step in self.steps if "perf/throughput" in step]
        seconds = sum(step["timing_s/step"] for step in steps)
        return sum(step["perf/throughput"] * step["timing_s/step"] for step in steps) / seconds if steps else None


@dataclass(frozen=True)
class Result(Run):
    """One layout of ours.

    between_phases: of the time after the warm-up, the share in which no phase ran in any pool; None with too few steps.
    It is the controller's time between its calls. What Ray and the controller take inside a phase is in the phase.
    """

    spec: PPOJobSpec
    between_phases: float | None = None

    @property
    def layout(self) -> Layout:
        """The layout as the cost model sees it."""
        return layout_of(self.spec)

    def phases(self) -> dict[str, float]:
        """Return the median seconds of each phase that every step has."""
        found = {name.removeprefix(_TIMING): s for name, s in self.metrics.items() if name.startswith(_TIMING)}
        return {phase: seconds for phase, seconds in found.items() if is_of_step(phase)}

    def step_over_longest_pool(self) -> float:
        """Return the step's length over the summed phases of the pool that has most to do; 1 is the least possible."""
        layout = self.layout
        work: dict[str, float] = {}
        for phase, seconds in self.phases().items():
            for pool in layout.pools_of(phase):
                work[pool] = work.get(pool, 0.0) + seconds
        return self.step_s / max(work.values())

    def replicas(self) -> int:
        """Return the number of vLLM's engines."""
        return self.layout.gpus_of(Phase.GENERATE) // self.spec.rollout.gpus_per_replica


def measure(name: str, job: Mapping[str, Any], folder: Path, *, stop_after: int | None = None) -> Result:
    """Run one layout to its end; a finished run of the same job in the folder is read, not repeated.

    Args:
        stop_after: step after which the run is killed, before it saves a checkpoint.

    Raises:
        RuntimeError: it failed; the message says where its log is.
    """
    finished, file, text = folder / "finished.json", folder / "job.yaml", yaml.safe_dump(dict(job))
    if not (finished.exists() and file.read_text(encoding="utf-8") == text):
        # What a run that failed, or one of another job, has left.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started = time.time()
        if code := run_job(job, folder, folder / "run", stop_after=stop_after):
            log = folder / "log.txt"
            raise RuntimeError(f"layout {name} ended with {code}: see {log}\n{log.read_text(encoding='utf-8')[-3000:]}")
        finished.write_text(json.dumps({"started": started}), encoding="utf-8")
    return read(name, folder)


def read(name: str, folder: Path) -> Result:
    """Read what a run has left."""
    started = json.loads((folder / "finished.json").read_text(encoding="utf-8"))["started"]
    spec = spec_of(yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8")))
    rows = steps_of(folder / "run")
    steps = [
        {metric: float(value) for metric, value in row.items() if isinstance(value, float)}
        for step, row in rows.items()
        if step > WARM_UP_STEPS
    ]
    share = share_between_phases(read_trace(folder / "run" / "trace.json"), WARM_UP_STEPS + 1)
    return Result(name, rows[1]["time"] - started, steps, spec, share)


def spec_of(job: Mapping[str, Any]) -> PPOJobSpec:
    """Return what a job says, with what follows from it."""
    _, _, spec = parse_manifest(job)
    return resolve(spec)


def share_between_phases(spans: Sequence[Span], first_step: int) -> float | None:
    """Return the share of the time in which no phase ran at all, from the beginning of a step to that of the last."""
    # A checkpoint asks for the data's position once more, so the first time counts.
    begins = {span.step: span.start for span in reversed(spans) if span.name == "data" and span.step >= first_step}
    if len(begins) < 2:
        return None
    start, end = min(begins.values()), max(begins.values())
    inside = ((max(span.start, start), min(span.end, end)) for span in spans if span.end > start and span.start < end)
    return 1 - busy_seconds(inside) / (end - start)
