"""Plans a job with other settings that change its speed and memory, and not its results. Called by `cli`.

Without gradient checkpointing, no layer is computed twice, but the activations of all layers stay in memory, so passes
may have to be smaller. Without offload, nothing is copied from and to the host, but roles keep their memory. `compile`
is not varied: the seconds of a plan do not depend on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from ppojob_api.v1alpha1.model import Offload
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.planning.gpus import Gpu
from ppojob_trainer.planning.plan import Plan, Runner, plan_job

__all__ = ["ChangedPlan", "plan_other_settings"]

FEWEST_TOKENS: Final = 4096
"""Passes are not made smaller than this: the plan does not know how much efficiency smaller ones lose."""


@dataclass(frozen=True)
class ChangedPlan:
    """A plan with other settings. changes: fields of the spec with their new values, such as
    `model.actor.gradientCheckpointing: False`.
    """

    changes: Mapping[str, bool | int]
    plan: Plan


def plan_other_settings(job: Plan, gpus: Mapping[str, Gpu], *, runner: Runner) -> Iterator[ChangedPlan]:
    """Yield the plans of other settings of gradient checkpointing, for each set of trained roles, and of offload.

    Checkpointing off for the roles that have it on, with the largest passes that fit; nothing if none fit, or only
    closely. The same without the offload of the trained roles, if they have any, also with checkpointing as it is. On
    for the roles that have it off if the job does not fit, or only closely.

    Args:
        job: the plan of the job as it is.
        gpus: of each pool.
        runner: see `plan_job`; `measured_once` saves most of the time.

    Raises:
        ValueError and the other errors of `plan_job`.
    """
    trained = {name: found.role.trained for name, found in job.roles.items() if found.role.trained is not None}
    recompute = [name for name, model in trained.items() if model.gradient_checkpointing]
    variants = [(job.spec, roles) for roles in _sets(recompute)]
    offloading = [name for name, model in trained.items() if model.offload != Offload()]
    if offloading:
        on_device = _without_offload(job.spec, offloading)
        variants += [(on_device, roles) for roles in ((), *_sets(recompute))]
    for spec, roles in variants:
        if (found := _largest_passes(_checkpointing(spec, roles, is_on=False), roles, gpus, runner)) is not None:
            yield ChangedPlan(_changes(job.spec, found.spec), found)
    if job.verdict == "fits":
        return
    for roles in _sets([name for name in trained if name not in recompute]):
        changed = plan_job(_checkpointing(job.spec, roles, is_on=True), gpus, runner=runner)
        yield ChangedPlan(_changes(job.spec, changed.spec), changed)


def _sets(roles: Collection[str]) -> Iterator[tuple[str, ...]]:
    for number in range(1, len(roles) + 1):
        yield from combinations(roles, number)


def _largest_passes(spec: PPOJobSpec, roles: Collection[str], gpus: Mapping[str, Gpu], runner: Runner) -> Plan | None:
    """Halve the passes of the roles, in pools that are full, until all pools fit; None if they never do."""
    while True:
        found = plan_job(spec, gpus, runner=runner)
        if found.verdict == "fits":
            return found
        full = {pool.name for pool in found.pools if pool.verdict != "fits"}
        smaller = _halved(found, [role for role in roles if found.roles[role].role.pool in full])
        if smaller == found.spec:
            return None
        spec = smaller


def _halved(plan: Plan, roles: Collection[str]) -> PPOJobSpec:
    limits = {name: plan.roles[name].role for name in roles}
    halves = {
        name: max(role.fewest_tokens(plan.spec), min(FEWEST_TOKENS, role.max_tokens), role.max_tokens // 2)
        for name, role in limits.items()
    }
    sections = {
        name: getattr(plan.spec, name).model_copy(update={"max_tokens_per_gpu": half}) for name, half in halves.items()
    }
    return plan.spec.model_copy(update=sections)


def _checkpointing(spec: PPOJobSpec, roles: Collection[str], *, is_on: bool) -> PPOJobSpec:
    # Only the inputs of layers that are computed again can be offloaded.
    changed = {"gradient_checkpointing": is_on} | ({} if is_on else {"activation_offload": False})
    models = {name: getattr(spec.model, name).model_copy(update=changed) for name in roles}
    return spec.model_copy(update={"model": spec.model.model_copy(update=models)})


def _without_offload(spec: PPOJobSpec, roles: Collection[str]) -> PPOJobSpec:
    models = {name: getattr(spec.model, name).model_copy(update={"offload": Offload()}) for name in roles}
    return spec.model_copy(update={"model": spec.model.model_copy(update=models)})


def _changes(before: PPOJobSpec, after: PPOJobSpec) -> dict[str, bool | int]:
    old = dict(_fields(before.to_wire()))
    return {field: value for field, value in _fields(after.to_wire()) if value != old.get(field)}


def _fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each field, such as `model.actor.compile`, and its value."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
