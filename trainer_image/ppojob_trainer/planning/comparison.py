"""The plan beside what was measured: the plan's error. Called by `report` and by `make plan-error`.

Planning all runs takes minutes, so their plans are stored in comparison.json; a test computes them again. Seconds are
predicted from the other runs, not from the run itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig

from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.planning.configs import read_shape
from ppojob_trainer.planning.gpus import GPUS, gpus_of_pools
from ppojob_trainer.planning.measured_runs import RUNS, MeasuredRun
from ppojob_trainer.planning.plan import Plan, plan_job
from ppojob_trainer.planning.seconds import TimedRun, seconds_of
from ppojob_trainer.planning.workload import Workload, workload_of

__all__ = ["Compared", "compare", "stored", "timed_runs"]

FILE: Final = Path(__file__).with_name("comparison.json")
_GB: Final = 1e9
_KINDS_OF_SECONDS: Final = {
    "step": "seconds of a step",
    "gen": "seconds of generation",
    "update_weights": "seconds of sending the weights",
}


@dataclass(frozen=True)
class Compared:
    """One measured number beside the plan's; unit: GB (1e9 bytes) or s. has_experts: of a mixture of experts."""

    run: str
    what: str
    unit: str
    measured: float
    planned: float
    has_experts: bool = False

    @property
    def error(self) -> float:
        """The plan's relative error."""
        return self.planned / self.measured - 1

    @property
    def kind(self) -> str:
        """What is compared, without the names of pool, role and phase."""
        if self.unit == "GB":
            kind = "memory of a pool" if self.what.startswith("pool ") else "memory of one role"
        else:
            kind = _KINDS_OF_SECONDS.get(self.what, "seconds of a forward pass or an update")
        return f"{kind}, experts" if self.has_experts else kind


def plan_of(run: MeasuredRun) -> Plan:
    """Return the plan of a run."""

    def shape(field: str, path: str, trust_remote_code: bool) -> PretrainedConfig:
        config = read_shape(field, path, trust_remote_code)
        for name, value in run.sizes.items():
            setattr(config, name, value)
        # Of dense models alone.
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[: config.num_hidden_layers]
        return config

    spec = parse_spec(dict(run.spec))
    return plan_job(spec, gpus_of_pools([pool.name for pool in spec.pools], [run.gpu]), shapes=shape)


def compare(plans: Mapping[str, Plan]) -> list[Compared]:
    """Return all comparisons; `plans`: by the names of the runs."""
    timed = {name: _timed(_run(name), _workload(_run(name), plan)) for name, plan in plans.items()}
    found: list[Compared] = []
    for name, plan in plans.items():
        run, workload = _run(name), timed[name].workload
        found += _memory(run, plan)
        if run.phases:
            seconds = seconds_of(plan.spec, workload, timed[name].gpu, _others(name, timed))
            planned = {**seconds.phases, "step": seconds.step.seconds}
            found += [
                Compared(name, phase, "s", value, round(planned[phase], 2), workload.has_experts)
                for phase, value in {**run.phases, "step": run.step}.items()
                if value is not None and phase in planned
            ]
    return found


def _others(name: str, timed: Mapping[str, TimedRun]) -> list[TimedRun]:
    """Return the runs from which a run's seconds are predicted."""
    return [one for other, one in timed.items() if other != name and one.seconds and _run(other).predicts]


def _memory(run: MeasuredRun, plan: Plan) -> Iterator[Compared]:
    has_experts = any(pool.has_experts for pool in plan.pools)
    for pool in plan.pools:
        if pool.name in run.pools:
            planned = round(pool.total / _GB, 1)
            yield Compared(run.name, f"pool {pool.name}", "GB", run.pools[pool.name], planned, pool.has_experts)
    for name, value in run.roles.items():
        yield Compared(run.name, name, "GB", value, round(plan.roles[name].peak / _GB, 1), has_experts)


def _run(name: str) -> MeasuredRun:
    return next(run for run in RUNS if run.name == name)


def _timed(run: MeasuredRun, workload: Workload) -> TimedRun:
    return TimedRun(workload, run.phases, GPUS[run.gpu])


def _workload(run: MeasuredRun, plan: Plan) -> Workload:
    roles = {name: found.role for name, found in plan.roles.items()}
    measured = {name: found.measured for name, found in plan.roles.items()}
    if run.sends_all:
        measured["actor"] = replace(measured["actor"], changing=None)
    if run.waits_for_moments:
        # It waited for both ways of them. Their bytes are in nothing else of a workload.
        measured = {name: replace(one, optimizer=2 * one.optimizer) for name, one in measured.items()}
    return workload_of(plan.spec, roles, measured)


@cache
def stored() -> tuple[list[Compared], list[TimedRun]]:
    """Return the stored comparisons, and the timed runs for predictions."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    runs = [(_run(name), Workload(**one)) for name, one in content["workloads"].items()]
    timed = [_timed(run, workload) for run, workload in runs if run.predicts]
    return [Compared(**one) for one in content["compared"]], timed


def timed_runs() -> list[TimedRun]:
    """Return the runs whose phases were measured, and from which those of other jobs are predicted."""
    return stored()[1]


def computed() -> str:
    """Plan all runs; return the content of the file."""
    plans = {run.name: plan_of(run) for run in RUNS}
    workloads = {name: asdict(_workload(_run(name), plan)) for name, plan in plans.items() if _run(name).phases}
    content = {"compared": [asdict(one) for one in compare(plans)], "workloads": workloads}
    return json.dumps(content, indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(computed())
