"""The table of what was measured: phases beside their floors, and the figures that say how good a layout is.

Called by `bench_split`. Behind the seconds of a phase stands how many times its floor that is, on the GPUs that the
layout gives it (`floors`; on known devices only). A peer's run has phases and step; what follows from a layout of ours
is left empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.table import Table

from ppojob_api.v1alpha1.pools import Role
from ppojob_trainer.controller.phases import Phase
from tests.bench import workload
from tests.bench.floors import floors, num_parameters
from tests.bench.measurement import WARM_UP_STEPS, Result, Run

PHASES = (
    "gen", "old_log_prob", "values", "ref", "reward", "reward_model", "adv", "update_critic", "update_actor",
    "update_weights",
)  # fmt: skip
_ROLES = (Role.ACTOR, Role.CRITIC, Role.REF)


def table(results: Sequence[Run], size: workload.Size, alone_s: Mapping[int, float]) -> Table:
    """Return the table, a column for each run.

    Args:
        alone_s: seconds of the engine alone, by the number of prompts that a replica gets.
    """
    shown = Table(title=f"workload W, {size.shape}: seconds, medians after {WARM_UP_STEPS} steps")
    shown.add_column("(x: times the floor)")
    for result in results:
        shown.add_column(result.name, justify="right")
    limits = [_floors(result, size) if isinstance(result, Result) else {} for result in results]
    for phase in PHASES:
        both = zip(results, limits, strict=True)
        shown.add_row(phase, *(_phase(result, phase, found.get(phase)) for result, found in both))
    shown.add_section()
    first = results[0]
    _row(shown, "step", results, lambda result: f"{result.step_s:.3f}")
    _row(shown, f"ratio to {first.name}, seconds", results, lambda result: f"{result.step_s / first.step_s:.3f}")
    _row(shown, "tokens/s per GPU", results, lambda result: _number(result.tokens_per_s))
    _row(shown, f"ratio to {first.name}, tokens/s", results, lambda result: _number(_speed(result, first)))
    ours = _only_ours(lambda result: f"{result.step_over_longest_pool():.3f}")
    _row(shown, "step / longest pool's own phases", results, ours)
    ours = _only_ours(lambda result: _share(result.between_phases))
    _row(shown, "no phase in any pool, share of the time", results, ours)
    both = zip(results, limits, strict=True)
    shown.add_row("weight sync to each engine, GB/s", *(_bandwidth(result, size, found) for result, found in both))
    if alone_s:
        ours = _only_ours(lambda result: _number(_gen_ratio(result, size, alone_s)))
        _row(shown, "gen: engine alone / ours", results, ours)
    _row(shown, "most memory in use on a GPU, GB", results, lambda result: _number(memory_peak(result)))
    _row(shown, "start to first step, s", results, lambda result: f"{result.first_step_s:.1f}")
    shown.add_section()
    for key in _others(results):
        _row(shown, key, results, lambda result, key=key: _number(result.metrics.get(key)))  # type: ignore[misc]
    return shown


def prompts_of_a_replica(result: Result, size: workload.Size) -> int:
    """Return how many prompts each engine gets."""
    return size.num_prompts // result.replicas()


def sync_bandwidth(result: Run) -> float | None:
    """Return the GB (1e9 bytes) per second that reached each engine, as the floor is for one; None without a push."""
    return result.metrics.get("comm_gb_per_s/update_weights")


def memory_peak(result: Run) -> float | None:
    """Return the most that was in use on any GPU of any pool, in GB (1e9); None on CPU."""
    peaks = [v for name, v in result.metrics.items() if name.startswith("pool/") and name.endswith("/memory_peak_gb")]
    return max(peaks, default=None)


def _speed(result: Run, first: Run) -> float | None:
    """Return a run's tokens per second over those of the first one."""
    speed, unit = result.tokens_per_s, first.tokens_per_s
    return None if speed is None or unit is None else speed / unit


def _gen_ratio(result: Result, size: workload.Size, alone_s: Mapping[int, float]) -> float | None:
    alone = alone_s.get(prompts_of_a_replica(result, size))
    return None if alone is None else alone / result.metrics["timing_s/gen"]


def _floors(result: Result, size: workload.Size) -> dict[str, float]:
    spec = result.spec
    pools = {role: spec.placement.pools_of(role) for role in _ROLES}
    gpus = {role.value: sum(spec.pool(pool).gpus for pool in placed) for role, placed in pools.items() if placed}
    gpus["rollout"] = result.layout.gpus_of(Phase.GENERATE)
    recomputes = {role: _recomputes(result, role) for role in ("actor", "critic")}
    # The job may have other settings than the workload (`--set`).
    responses = spec.data.train_batch_size * spec.rollout.samples_per_prompt
    return floors(workload.SHAPES[size.shape], replace(size, num_prompts=responses), gpus, recomputes)


def _recomputes(result: Result, role: str) -> bool:
    """Whether the updates of a role compute the layers a second time (`gradientCheckpointing`)."""
    model = result.spec.model.actor if role == "actor" else result.spec.model.critic
    return model is not None and model.gradient_checkpointing


def _others(results: Sequence[Run]) -> list[str]:
    """Return the further metrics that are shown: MFU, memory and use of the pools' GPUs, what overlapping saved."""
    shown = ("pool/", "perf/", "overlap/")
    return sorted({name for result in results for name in result.metrics if name.startswith(shown)})


def _phase(result: Run, phase: str, limit: float | None) -> str:
    seconds = result.metrics.get(f"timing_s/{phase}")
    if seconds is None:
        return "-"
    return f"{seconds:.3f}" + ("" if not limit else f" (x{seconds / limit:.1f})")


def _bandwidth(result: Run, size: workload.Size, limits: Mapping[str, float]) -> str:
    """Return the rate of the weights, and behind it the link's, of which the floor is."""
    rate, limit = _number(sync_bandwidth(result)), limits.get("update_weights")
    if limit is None:
        return rate
    weights = 2 * num_parameters(workload.SHAPES[size.shape], size)
    return f"{rate} (of {weights / 1e9 / limit:.0f})"


def _row(shown: Table, name: str, results: Sequence[Run], cell: Callable[[Run], str]) -> None:
    shown.add_row(name, *(cell(result) for result in results))


def _only_ours(cell: Callable[[Result], str]) -> Callable[[Run], str]:
    """Return a cell of what only a layout of ours has."""
    return lambda run: cell(run) if isinstance(run, Result) else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
