"""Rules of the spec that span fields, each in CEL for the API server and in Python for everybody else.

`spec.py` puts the CEL into the schema; `validation.py` runs the Python. One table of bad specs tests both.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ppojob_api.v1alpha1.base import Rule
from ppojob_api.v1alpha1.pools import Role

if TYPE_CHECKING:
    from ppojob_api.v1alpha1.spec import PPOJobSpec

Problem = tuple[str, object, str]
"""Path of the field below spec, its value, and a sentence with the remedy."""

_ROLES = [role.value for role in Role]
_SPLIT_MODES = ("ParallelUpdate", "Overlapped")

MUTABLE = ("runPolicy", "checkpoint.everySteps", "checkpoint.keep", "trainer.totalSteps", "trainer.validateEverySteps")
"""What may change while a job runs; the trainer learns of it in the reply to its next report of progress."""

IMMUTABLE = (
    "image", "imagePullSecrets", "env", "envFrom", "model", "data", "reward", "algorithm", "actor", "critic", "rollout",
    "device", "pools", "head", "placement", "schedule", "storage",
    "checkpoint.resume", "checkpoint.resumeFrom", "checkpoint.export",
    "trainer.seed", "trainer.validateBeforeTraining", "trainer.phaseTimeoutSeconds",
)  # fmt: skip
"""What may not change once the job is accepted: everything else."""

SPEC_RULES = [
    *(
        Rule(
            rule=f"!has(self.placement.{role}) || self.pools.exists(p, p.name == self.placement.{role})",
            message=f"placement.{role} must be the name of one of spec.pools",
            field_path=f".placement.{role}",
        )
        for role in _ROLES
    ),
    *(
        Rule(
            rule=f"self.data.trainBatchSize % self.{role}.miniBatchSize == 0",
            message=f"{role}.miniBatchSize must divide data.trainBatchSize",
            field_path=f".{role}.miniBatchSize",
        )
        for role in ("actor", "critic")
    ),
    Rule(
        rule=(
            "!(self.schedule.mode in ['ParallelUpdate', 'Overlapped']) || "
            "(has(self.placement.critic) && self.placement.critic != self.placement.actor)"
        ),
        message="this mode needs actor and critic in different pools; use Serial or Auto, or give the critic a pool",
        field_path=".schedule.mode",
    ),
]

METADATA_RULES = [
    Rule(
        rule=(
            "!has(oldSelf.status) || !has(oldSelf.status.conditions) || "
            "!oldSelf.status.conditions.exists(c, c.type == 'Accepted' && c.status == 'True') || "
            f"(has(self.spec.{part}) == has(oldSelf.spec.{part}) && "
            f"(!has(self.spec.{part}) || self.spec.{part} == oldSelf.spec.{part}))"
        ),
        message=f"spec.{part} cannot change once the job is accepted: create another PPOJob with the new value",
        field_path=f".spec.{part}",
    )
    for part in IMMUTABLE
]
"""Rules at the root of the object, where CEL sees the status too."""


def check(spec: "PPOJobSpec") -> Iterator[Problem]:
    """Yield every problem of a spec that spans fields."""
    for rule in _CHECKS:
        yield from rule(spec)


def _pool_names_are_unique(spec: "PPOJobSpec") -> Iterator[Problem]:
    seen: set[str] = set()
    for index, pool in enumerate(spec.pools):
        if pool.name in seen:
            yield f"pools[{index}].name", pool.name, "this name is taken by another pool: give each pool its own"
        seen.add(pool.name)


def _env_names_are_unique(spec: "PPOJobSpec") -> Iterator[Problem]:
    seen: set[str] = set()
    for index, variable in enumerate(spec.env):
        if variable.name in seen:
            yield f"env[{index}].name", variable.name, "this variable is given twice: keep one"
        seen.add(variable.name)


def _placement_names_pools(spec: "PPOJobSpec") -> Iterator[Problem]:
    names = [pool.name for pool in spec.pools]
    for role in _ROLES:
        name = getattr(spec.placement, role)
        if name is not None and name not in names:
            yield (
                f"placement.{role}",
                name,
                f"there is no pool of this name: use one of {', '.join(names)}, or add the pool",
            )


def _mini_batches_divide_the_batch(spec: "PPOJobSpec") -> Iterator[Problem]:
    batch = spec.data.train_batch_size
    for role, size in (("actor", spec.actor.mini_batch_size), ("critic", spec.critic.mini_batch_size)):
        if batch % size:
            fitting = max(n for n in range(1, min(size, batch) + 1) if batch % n == 0)
            yield f"{role}.miniBatchSize", size, f"does not divide data.trainBatchSize ({batch}): use {fitting}, say"


def _modes_fit_the_pools(spec: "PPOJobSpec") -> Iterator[Problem]:
    is_split = spec.placement.critic not in (None, spec.placement.actor)
    if spec.schedule.mode in _SPLIT_MODES and not is_split:
        remedy = "needs actor and critic in different pools: use Serial or Auto, or give the critic its own pool"
        yield "schedule.mode", spec.schedule.mode.value, remedy


def _sources_have_their_blocks(spec: "PPOJobSpec") -> Iterator[Problem]:
    for name, source in (("train", spec.data.train), ("validation", spec.data.validation)):
        if source is not None and (block := source.missing_block):
            yield f"data.{name}.{block}", None, f"type {source.type} needs the block {block}: add it"


def _reward_is_module_or_file(spec: "PPOJobSpec") -> Iterator[Problem]:
    function = spec.reward.function
    if (function.module is None) == (function.path is None):
        value = {"module": function.module, "path": function.path}
        yield "reward.function", value, "give either module or path, not both and not neither"


_CHECKS: tuple[Callable[["PPOJobSpec"], Iterator[Problem]], ...] = (
    _pool_names_are_unique,
    _env_names_are_unique,
    _placement_names_pools,
    _mini_batches_divide_the_batch,
    _modes_fit_the_pools,
    _sources_have_their_blocks,
    _reward_is_module_or_file,
)
