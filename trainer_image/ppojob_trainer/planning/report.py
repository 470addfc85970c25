"""A plan as text, and as JSON. Called by `cli`. Sizes are in GB (1e9 bytes)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from ppojob_trainer.planning.comparison import Compared, stored, timed_runs
from ppojob_trainer.planning.gpus import Gpu
from ppojob_trainer.planning.plan import HostPlan, Plan
from ppojob_trainer.planning.pool import PoolPlan
from ppojob_trainer.planning.seconds import Seconds, idle_shares, seconds_of
from ppojob_trainer.planning.settings import ChangedPlan
from ppojob_trainer.planning.traffic import Link, links_of
from ppojob_trainer.planning.workload import workload_of

__all__ = ["as_json", "as_text"]

_GB: Final = 1e9
_COLUMNS: Final = ("parameters (billions)", "weights", "gradients", "optimizer", "activations", "peak")


def as_text(
    plan: Plan,
    others: Sequence[Plan] = (),
    settings: Sequence[ChangedPlan] | None = None,
    *,
    each_error: bool = False,
    network: float | None = None,
) -> Group:
    """Return the tables and sentences of a plan.

    Args:
        others: plans of other sizes of its pools.
        settings: plans of other settings; None: they were not planned.
        network: see `seconds.seconds_of`.
        each_error: show the plan beside each measured number, instead of the range of its errors.
    """
    parts: list[RenderableType] = [_words(plan), ""]
    for pool in plan.pools:
        parts += [_pool(pool), *_engine(plan, pool), *[f"  change {change}" for change in pool.changes], ""]
    parts += [_hosts(plan.hosts), "", _links(_links_of(plan)), ""]
    if others:
        parts += [_layouts([plan, *others], network), ""]
    if settings is not None:
        parts += [_settings(plan, settings, network), ""]
    parts += [_seconds(plan, network), "", (_errors if each_error else _ranges)(stored()[0])]
    if notes := [*plan.notes, *phases_beyond_limit(plan, network)]:
        parts += ["", *[f"note: {note}" for note in notes]]
    return Group(*parts)


def as_json(
    plan: Plan,
    others: Sequence[Plan] = (),
    settings: Sequence[ChangedPlan] | None = None,
    network: float | None = None,
) -> str:
    """Return the same as JSON; sizes in bytes."""
    seconds = _seconds_of(plan, network)
    content: dict[str, Any] = {
        "fits": plan.fits,
        "isClose": plan.is_close,
        "pools": [_pool_values(pool) for pool in plan.pools],
        "hosts": [{**vars(host), "fits": host.fits} for host in plan.hosts],
        "links": [vars(link) for link in _links_of(plan)],
        "seconds": {**seconds.phases, "step": seconds.step.seconds},
        "networkSeconds": seconds.network,
        "idleShares": _idle_shares(plan),
        "assumptions": list(_assumptions(plan)),
        "notes": [*plan.notes, *phases_beyond_limit(plan, network)],
        "layouts": [
            {"pools": {pool.name: pool.gpus for pool in one.spec.pools}, "fits": one.fits, "isClose": one.is_close}
            for one in others
        ],
        "settings": [
            {
                "changes": one.changes,
                "fits": one.plan.fits,
                "isClose": one.plan.is_close,
                "step": _step_of(one.plan, network),
            }
            for one in _fastest_first(settings or [], network)
        ],
        "errors": [_error(one) for one in stored()[0]],
    }
    return json.dumps(content, indent=2)


def _pool_values(pool: PoolPlan) -> dict[str, Any]:
    return {
        "pool": pool.name,
        "gpu": pool.gpu.name,
        "gpuBytes": pool.gpu.memory,
        "bytes": pool.total,
        "fits": pool.fits,
        "isClose": pool.is_close,
        "changes": list(pool.changes),
        "training": pool.memory.training,
        "push": pool.memory.push,
        "generation": pool.memory.generation,
        "processes": pool.memory.processes,
        "rollout": None if pool.engine is None else vars(pool.engine),
        "roles": [
            {
                "role": found.role.name,
                "parameters": found.measured.num_parameters,
                "weights": found.need.weights,
                "gradients": found.need.gradients,
                "optimizer": found.need.optimizer,
                "activations": found.need.activations,
                "peak": found.peak,
                "staysGathered": found.stays_gathered,
                "stages": found.stages,
                "expertsOver": found.experts_over,
            }
            for found in pool.roles
        ],
    }


def _error(one: Compared) -> dict[str, Any]:
    numbers = {"run": one.run, "what": one.what, "unit": one.unit, "measured": one.measured, "planned": one.planned}
    return {**numbers, "error": one.error, "hasExperts": one.has_experts}


def _words(plan: Plan) -> str:
    found = "The job fits." if plan.fits else "The job does not fit: see the changes below."
    if close := [pool for pool in plan.pools if pool.is_close]:
        found = " ".join([*(["The job is close."] if plan.fits else [found]), *map(_close_words, close)])
    return " ".join([found, *_assumptions(plan)])


def _close_words(pool: PoolPlan) -> str:
    return (
        f"Pool {pool.name} is planned at {_gb(pool.total)} of {_gb(pool.gpu.memory)} GB, and measured pools used up "
        f"to {pool.known_error:.0%} more than planned: it may run out of memory without one of the changes below."
    )


def _assumptions(plan: Plan) -> Iterator[str]:
    divided = [name for name, role in plan.roles.items() if role.experts_over > 1]
    if divided:
        yield (
            f"Routing is taken to be even ({', '.join(divided)}): all experts of a layer get equally many tokens. A "
            "GPU whose experts get more needs more memory and time."
        )


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _gb(size: float) -> str:
    return f"{size / _GB:.1f}"


def _pool(pool: PoolPlan) -> Table:
    table = _table(f"pool {pool.name}, GB on each {pool.gpu.name}", *_COLUMNS)
    for found in pool.roles:
        need = found.need
        sizes = (need.weights, need.gradients, need.optimizer, need.activations, found.peak)
        remarks = ["stays gathered"] if found.stays_gathered else []
        of_each = f", {found.stages_of_a_rank} of each rank" if found.stages_of_a_rank > 1 else ""
        remarks += [f"most of {found.stages} stages{of_each}"] if found.stages > 1 else []
        remarks += [f"experts over {found.experts_over}"] if found.experts_over > 1 else []
        name = found.role.name + (f" ({', '.join(remarks)})" if remarks else "")
        table.add_row(name, f"{found.measured.num_parameters / 1e9:.2f}", *map(_gb, sizes))
    memory = pool.memory
    if pool.engine is not None:
        table.add_row("rollout (vLLM's share)", *[""] * 5, _gb(memory.engine))
    table.add_row("CUDA and NCCL", *[""] * 5, _gb(memory.processes))
    table.add_row("while roles compute", *[""] * 5, _gb(memory.training + memory.processes))
    if memory.push:
        table.add_row("while weights are sent", *[""] * 5, _gb(memory.push + memory.processes))
    if pool.engine is not None:
        table.add_row("while engines generate", *[""] * 5, _gb(memory.generation + memory.processes))
    table.add_row(f"most, of {_gb(pool.gpu.memory)} GB: {pool.verdict}", *[""] * 5, _gb(pool.total))
    return table


def _engine(plan: Plan, pool: PoolPlan) -> Iterator[str]:
    engine = pool.engine
    if engine is not None:
        yield (
            f"  each engine: weights {_gb(engine.weights)} GB, activations and logits about {_gb(engine.working)} GB, "
            f"cache {engine.cache_per_token / 1e3:.0f} kB for a token: {engine.num_sequences} sequences at once "
            f"(rollout.maxNumSeqs {plan.spec.rollout.max_num_seqs})"
        )


def _hosts(hosts: Sequence[HostPlan]) -> Table:
    table = _table("host memory of a pod, GB", "after loading", "saving", "exporting", "limit", "")
    for host in hosts:
        sizes = (host.load, host.save, host.export, host.limit)
        verdict = "fits" if host.fits else f"raise pools.{host.pool}.resourcesPerGPU.memory"
        table.add_row(f"pool {host.pool}", *map(_gb, sizes), verdict)
    return table


def _layouts(plans: Sequence[Plan], network: float | None) -> Table:
    table = _table("GPUs of the pools", "GPUs", "most on a GPU, GB", "step, s", "")
    for number, plan in enumerate(plans):
        sizes = ", ".join(f"{pool.name} {pool.gpus}" for pool in plan.spec.pools)
        most = max(pool.total for pool in plan.pools)
        verdict = plan.verdict + ("" if number else ": the job as it is")
        gpus = str(sum(pool.gpus for pool in plan.spec.pools))
        table.add_row(sizes, gpus, _gb(most), f"{_step_of(plan, network):.1f}", verdict)
    return table


def _settings(plan: Plan, others: Sequence[ChangedPlan], network: float | None) -> Group:
    table = _table("other settings, with the same results", "most on a GPU, GB", "step, s", "")
    for number, one in enumerate([ChangedPlan({}, plan), *_fastest_first(others, network)]):
        changes = ", ".join(f"{field}: {json.dumps(value)}" for field, value in one.changes.items())
        most = max(pool.total for pool in one.plan.pools)
        name = changes if number else "the job as it is"
        table.add_row(name, _gb(most), f"{_step_of(one.plan, network):.1f}", one.plan.verdict)
    return Group(
        table, *([] if others else ["No other setting of gradientCheckpointing or offload is faster and fits."])
    )


def _fastest_first(plans: Sequence[ChangedPlan], network: float | None) -> list[ChangedPlan]:
    return sorted(plans, key=lambda one: _step_of(one.plan, network))


def _step_of(plan: Plan, network: float | None) -> float:
    return _seconds_of(plan, network).step.seconds


def _links_of(plan: Plan) -> list[Link]:
    roles = {name: found.role for name, found in plan.roles.items()}
    return links_of(plan.spec, roles, {name: found.measured for name, found in plan.roles.items()})


def _links(links: Sequence[Link]) -> Table:
    table = _table("traffic of a step", "link", "GB each", "number", "GB each from other hosts")
    for link in links:
        outside = f"{link.from_other_hosts / _GB:.2f}" if link.from_other_hosts else ""
        table.add_row(link.what, link.way, f"{link.bytes_each / _GB:.2f}", str(link.number), outside)
    return table


def _slowest(plan: Plan) -> Gpu:
    return min((pool.gpu for pool in plan.pools), key=lambda gpu: gpu.peak_flops)


def _seconds_of(plan: Plan, network: float | None) -> Seconds:
    roles = {name: found.role for name, found in plan.roles.items()}
    work = workload_of(plan.spec, roles, {name: found.measured for name, found in plan.roles.items()})
    return seconds_of(plan.spec, work, _slowest(plan), timed_runs(), _idle_shares(plan), network)


def _idle_shares(plan: Plan) -> dict[str, float]:
    return idle_shares(plan.spec, {name: found.role for name, found in plan.roles.items()})


def _seconds(plan: Plan, network: float | None) -> Group:
    found, gpu = _seconds_of(plan, network), _slowest(plan)
    has_network = any(found.network.values())
    table = _table("seconds of a step", "", *(["network between hosts"] if has_network else []))
    idle = _idle_shares(plan)
    for phase, seconds in found.phases.items():
        waits = f" (pipeline: {idle[phase]:.0%} idle)" if phase in idle else ""
        of_network = [f"{found.network[phase]:.1f}" if found.network[phase] else ""] if has_network else []
        table.add_row(phase + waits, f"{seconds:.1f}", *of_network)
    table.add_row("step", f"{found.step.seconds:.1f}")
    measured = list(dict.fromkeys(f"{run.gpu.name}s" for run in timed_runs()))
    scaled = "" if f"{gpu.name}s" in measured else f", scaled to {gpu.name} by the data sheets"
    rates = (
        f"Rates: {len(timed_runs())} runs on one or two {' or '.join(measured)} of one host (docs/measured.md){scaled}."
    )
    if has_network:
        rates += (
            f" Between hosts: {(gpu.network if network is None else network) / _GB:g} GB/s for each GPU (--network); "
            "no run on several hosts was measured."
        )
    return Group(table, rates)


def phases_beyond_limit(plan: Plan, network: float | None = None) -> Iterator[str]:
    """Yield a sentence for each phase that would end an attempt, because it takes longer than its limit."""
    limit = plan.spec.trainer.phase_timeout_seconds
    for phase, seconds in _seconds_of(plan, network).phases.items():
        if seconds > limit:
            yield (
                f"{phase} may take {seconds:.0f} s if all responses have data.maxResponseLength tokens: more than "
                f"trainer.phaseTimeoutSeconds ({limit}) ends the attempt"
            )


def _ranges(compared: Sequence[Compared]) -> Table:
    table = _table("error against measured runs (each: --errors)", "error", "numbers")
    for kind in dict.fromkeys(one.kind for one in compared):
        errors = [one.error for one in compared if one.kind == kind]
        bounds = dict.fromkeys(round(100 * error) for error in (min(errors), max(errors)))
        table.add_row(kind, " to ".join(f"{bound:+d}%" for bound in bounds), str(len(errors)))
    return table


def _errors(compared: Sequence[Compared]) -> Table:
    table = _table("error against measured runs", "what", "measured", "plan", "error")
    name = ""
    for one in compared:
        table.add_row(
            one.run if one.run != name else "",
            one.what,
            f"{one.measured:g} {one.unit}",
            f"{one.planned:g} {one.unit}",
            f"{one.error:+.0%}",
        )
        name = one.run
    return table
