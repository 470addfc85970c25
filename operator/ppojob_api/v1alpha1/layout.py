"""The layout: which GPUs there are, who gets them, over how many of them a model is divided, and how memory is used.

It is the part of the spec that may change while a job runs, at the price of a restart from a checkpoint: checkpoints
are of whole tensors, so any layout reads them, and no field of it changes what the algorithm computes.
`status.effectiveLayout` has the one in force; the operator compares it with the spec's. `rules.py` lets these fields
change.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.pools import Placement, Pools
from ppojob_api.v1alpha1.quantities import RawObject
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
    """Over how many GPUs a layer of a rollout engine is divided."""

    tensor_parallel_size: int = Field(ge=1)
    """GPUs of one replica, or of each of its stages."""


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
    settings: RawObject | None = None
    """The other fields of the spec that may change with a restart, where they differ from their defaults. Absent: an
    earlier version wrote this, and they are those of the spec."""


SETTINGS = (
    "image", "imagePullSecrets", "env", "envFrom", "head",
    *(f"model.{role}.{field}" for role in ("actor", "critic")
      for field in ("gradientCheckpointing", "compile", "offload", "activationOffload", "reshardAfterForward")),
    *(f"model.ref.{field}" for field in ("compile", "offload", "reshardAfterForward")),
    "model.reward.maxTokensPerGPU", "actor.maxTokensPerGPU", "critic.maxTokensPerGPU",
    "actor.fsdpSize", "critic.fsdpSize", "actor.pipelineParallelSize", "critic.pipelineParallelSize",
    "actor.virtualPipelineParallelSize", "critic.virtualPipelineParallelSize",
    "actor.expertParallelSize", "critic.expertParallelSize",
    *(f"rollout.{field}" for field in
      ("gpuMemoryUtilization", "maxNumSeqs", "maxNumBatchedTokens", "enableChunkedPrefill", "enablePrefixCaching",
       "enforceEager", "pipelineParallelSize", "enableExpertParallel", "logProbs", "sleep", "cpuCacheGib",
       "speculative", "engineArgs")),
    "checkpoint.async", "trainer.dataWorkers", "trainer.phaseTimeoutSeconds",
)  # fmt: skip
"""Fields that decide about memory, speed and the environment, and about no number but for rounding."""

RELAID = (
    "pools", "placement", "schedule",
    "actor.tensorParallelSize", "actor.sequenceParallelSize", "critic.tensorParallelSize",
    "critic.sequenceParallelSize", "rollout.tensorParallelSize",
    *SETTINGS,
)  # fmt: skip
"""The fields of the spec that are the layout."""


def digest_of(layout: Layout) -> str:
    """Return a short name of a layout: equal ones have the same."""
    return hashlib.sha256(json.dumps(layout.to_wire(), sort_keys=True).encode()).hexdigest()[:16]


def layout_of(spec: PPOJobSpec) -> Layout:
    """Return the layout of a resolved spec."""
    return Layout(
        # What autoBalance may do is not part of what is.
        pools=[pool.model_copy(update={"min_nodes": None, "max_nodes": None}) for pool in spec.pools],
        placement=spec.placement,
        schedule=spec.schedule,
        actor=TrainedSizes.of(spec.actor),
        critic=TrainedSizes.of(spec.critic),
        rollout=RolloutSizes(tensor_parallel_size=spec.rollout.tensor_parallel_size),
        settings=_settings_of(spec),
    )


def _settings_of(spec: PPOJobSpec) -> dict[str, Any]:
    # Without defaults: a version with another default, or with a new field, must not restart every job.
    wire = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    found: dict[str, Any] = {}
    for path in SETTINGS:
        value = _value(wire, path)
        if value is not None:
            for name in reversed(path.split(".")):
                value = {name: value}
            _merge(found, value)
    return found


def with_layout(raw: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return a spec as it stands on the wire, with another layout in it."""
    wire = layout.to_wire()
    relaid = deepcopy(dict(raw))
    if layout.settings is not None:
        for path in SETTINGS:
            _remove(relaid, path.split("."))
        _merge(relaid, layout.settings)
    _merge(relaid, {name: wire[name] for name in ("actor", "critic", "rollout")})
    return {**relaid, **{name: wire[name] for name in ("pools", "placement", "schedule")}}


def with_elastic_bounds(relaid: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec on the wire, with the bounds that the elastic pools of another one have; they need no restart."""
    bounds = {pool.get("name"): pool.get("elastic") for pool in raw.get("pools", []) if isinstance(pool, Mapping)}
    pools = deepcopy(relaid["pools"])
    for pool in pools:
        own = bounds.get(pool["name"])
        if "elastic" in pool and isinstance(own, Mapping):
            pool |= {"elastic": dict(own), "nodes": own.get("maxNodes")}
    return {**relaid, "pools": pools}


def _remove(raw: dict[str, Any], path: Sequence[str]) -> None:
    for section in path[:-1]:
        raw = raw.get(section, {})
    raw.pop(path[-1], None)


def _merge(raw: dict[str, Any], wire: Mapping[str, Any]) -> None:
    """Put the fields of the sections that are in `wire` into those of `raw`."""
    for name, value in wire.items():
        if isinstance(value, Mapping) and isinstance(raw.setdefault(name, {}), dict):
            _merge(raw[name], value)
        else:
            raw[name] = deepcopy(value)


def differences(old: Layout, new: Layout) -> list[str]:
    """Return in words what differs in `new`, one entry for each field: `pool critic: nodes 1 -> 2`."""
    before = {pool.name: pool for pool in old.pools}
    after = {pool.name: pool for pool in new.pools}
    words = [f"pool {name} is removed" for name in before if name not in after]
    for name, pool in after.items():
        if name not in before:
            words.append(f"pool {name} is added with {pool.nodes} x {pool.gpus_per_node} GPUs")
        else:
            words += [f"pool {name}: {change}" for change in _changes(before[name], pool)]
    for part in ("placement", "schedule", "actor", "critic", "rollout"):
        words += [f"{part}.{change}" for change in _changes(getattr(old, part), getattr(new, part))]
    if old.settings is not None and new.settings is not None:
        for path in SETTINGS:
            words += _change(path, _value(old.settings, path), _value(new.settings, path), absent="default")
    return words


def _value(settings: Mapping[str, Any], path: str) -> Any:
    found: Any = settings
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _changes(old: ApiModel, new: ApiModel) -> Iterator[str]:
    before, after = old.to_wire(), new.to_wire()
    for field in type(new).model_fields.values():
        name = field.alias or ""
        yield from _change(name, before.get(name), after.get(name), absent="none")


def _change(name: str, old: Any, new: Any, *, absent: str) -> Iterator[str]:
    """Yield `field old -> new` if they differ. Objects and lists of objects are only named: they may hold passwords."""
    if old == new:
        return
    words = [absent if value is None else _in_words(value) for value in (old, new)]
    yield f"{name} changes" if None in words else f"{name} {words[0]} -> {words[1]}"


def _in_words(value: Any) -> str | None:
    if isinstance(value, list):
        return f"[{', '.join(value)}]" if all(isinstance(item, str) for item in value) else None
    return None if isinstance(value, dict) else str(value)
