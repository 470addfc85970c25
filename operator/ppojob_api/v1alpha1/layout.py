"""The layout: which GPUs there are, who gets them, and over how many of them a model is divided.

It is the part of the spec that may change while a job runs, at the price of a restart from a checkpoint: checkpoints
are of whole tensors, so any layout reads them. `status.effectiveLayout` says which one is in force; the operator
compares it with the spec's. `rules.py` lets these fields change.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.pools import Placement, Pools
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import ScheduleSpec, Trained


class TrainedSizes(ApiModel):
    """Over how many GPUs a trained model is divided."""

    tensor_parallel_size: int = Field(ge=1)
    """GPUs that each hold a part of every layer."""
    sequence_parallel_size: int = Field(ge=1)
    """GPUs that each compute a slice of every sequence."""

    @classmethod
    def of(cls, training: Trained) -> "TrainedSizes":
        """Return those of a section of the spec."""
        return cls(
            tensor_parallel_size=training.tensor_parallel_size,
            sequence_parallel_size=training.sequence_parallel_size,
        )


class RolloutSizes(ApiModel):
    """Over how many GPUs a rollout engine is divided."""

    tensor_parallel_size: int = Field(ge=1)
    """GPUs of one replica."""


class Layout(ApiModel):
    """Pools, who is in them, and the sizes that depend on them."""

    pools: Pools
    """Pools of GPUs; each has one kind of node."""
    placement: Placement
    """The pool of each role."""
    schedule: ScheduleSpec
    """Which phases of a step run at the same time."""
    actor: TrainedSizes
    """Sizes of the actor."""
    critic: TrainedSizes
    """Sizes of the critic."""
    rollout: RolloutSizes
    """Sizes of the rollout engines."""


RELAID = (
    "pools", "placement", "schedule",
    "actor.tensorParallelSize", "actor.sequenceParallelSize", "critic.tensorParallelSize",
    "critic.sequenceParallelSize", "rollout.tensorParallelSize",
)  # fmt: skip
"""The fields of the spec that are the layout."""


def layout_of(spec: PPOJobSpec) -> Layout:
    """Return the layout of a resolved spec."""
    return Layout(
        # What autoBalance may do is no part of what is.
        pools=[pool.model_copy(update={"min_nodes": None, "max_nodes": None}) for pool in spec.pools],
        placement=spec.placement,
        schedule=spec.schedule,
        actor=TrainedSizes.of(spec.actor),
        critic=TrainedSizes.of(spec.critic),
        rollout=RolloutSizes(tensor_parallel_size=spec.rollout.tensor_parallel_size),
    )


def with_layout(raw: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return a spec as it stands on the wire, with another layout in it."""
    wire = layout.to_wire()
    sections = {name: {**raw.get(name, {}), **wire[name]} for name in ("actor", "critic", "rollout")}
    return {**raw, **{name: wire[name] for name in ("pools", "placement", "schedule")}, **sections}


def differences(old: Layout, new: Layout) -> list[str]:
    """Return in words what is another in `new`, one entry for each field: `pool critic: nodes 1 -> 2`."""
    before = {pool.name: pool for pool in old.pools}
    after = {pool.name: pool for pool in new.pools}
    words = [f"pool {name} is taken away" for name in before if name not in after]
    for name, pool in after.items():
        if name not in before:
            words.append(f"pool {name} is added with {pool.nodes} x {pool.gpus_per_node} GPUs")
        else:
            words += [f"pool {name}: {change}" for change in _changes(before[name], pool)]
    for part in ("placement", "schedule", "actor", "critic", "rollout"):
        words += [f"{part}.{change}" for change in _changes(getattr(old, part), getattr(new, part))]
    return words


def _changes(old: ApiModel, new: ApiModel) -> Iterator[str]:
    """Yield `field old -> new`; what is no single word is only named."""
    before, after = old.to_wire(), new.to_wire()
    names = [field.alias or "" for field in type(new).model_fields.values()]
    for name in names:
        if before.get(name) == after.get(name):
            continue
        is_plain = not any(isinstance(wire.get(name), dict | list) for wire in (before, after))
        yield f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}" if is_plain else f"{name} is another"
