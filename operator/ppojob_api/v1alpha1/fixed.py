"""Which fields of the spec may change, and which are fixed once the job is accepted: in CEL and in Python.

`policy.py` puts the CEL into the ValidatingAdmissionPolicy; the admission webhook runs the Python.
"""

import json
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from ppojob_api.v1alpha1.base import ApiModel, Problem, Rule
from ppojob_api.v1alpha1.layout import RELAID
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.templates import TEMPLATED
from ppojob_api.v1alpha1.training import ScheduleMode

LIVE = (
    "runPolicy",
    "checkpoint.everySteps",
    "checkpoint.keep",
    "trainer.totalSteps",
    "trainer.totalEpochs",
    "trainer.validateEverySteps",
)
"""What may change while a job runs; the reply to the trainer's next report has the new values."""

MUTABLE = (*LIVE, "autoBalance", *RELAID)
"""What may change once the job is accepted; another layout is a restart from a checkpoint."""

IMMUTABLE = (
    "templateRef", "serviceAccountName", "model", "data", "reward", "algorithm", "actor", "critic", "rollout",
    "workers", "device", "storage", "telemetry",
    "checkpoint.path", "checkpoint.resume", "checkpoint.resumeFrom", "checkpoint.export",
    "checkpoint.exportTo",
    "trainer.seed", "trainer.validateBeforeTraining",
    "runPolicy.queueName", "runPolicy.queuePriorityClass", "runPolicy.gangScheduler", "runPolicy.gangSchedulerQueue",
)  # fmt: skip
"""What may not change once the job is accepted: everything else. Of a section, what is not in `MUTABLE`."""

_REMEDY = "cannot change once the job is accepted: create another PPOJob with the new value"
_MODE_REMEDY = (
    "a change from or to mode OneStepOff, or of its maxStaleness or weightUpdates, would change what is computed: "
    "create another PPOJob with the new value"
)


def section_at(path: str) -> type[ApiModel]:
    """Return the model of a section of the spec by its path on the wire."""
    section: type[ApiModel] = PPOJobSpec
    for name in path.split("."):
        [annotation] = [field.annotation for field in section.model_fields.values() if field.alias == name]
        # `X | None` has two arguments.
        [section] = [
            kind for kind in (get_args(annotation) or (annotation,)) if isinstance(kind, type) and kind is not NoneType
        ]
    return section


def _is_as_before(path: str) -> str:
    """Return in CEL that the fixed fields of a part of the spec have not changed."""
    is_split = any(mutable.startswith(f"{path}.") for mutable in MUTABLE)
    field = _field_at(path) if path.split(".")[0] in TEMPLATED else None
    if is_split or (field is not None and _is_section(field.annotation)):
        fields = (f"{path}.{field.alias}" for field in section_at(path).model_fields.values())
        return " && ".join(_is_as_before(field) for field in fields if field not in MUTABLE)
    optional = "".join(f".?{name}" for name in path.split("."))
    if field is not None and isinstance(field.default, str | bool | int):
        # The API server does not store this default. An earlier version has, and `kubectl replace` removes it.
        optional += f".orValue({json.dumps(field.default)})"
    return f"self{optional} == oldSelf{optional}"


def _field_at(path: str) -> FieldInfo:
    parents, _, name = path.rpartition(".")
    section = section_at(parents) if parents else PPOJobSpec
    [field] = [field for field in section.model_fields.values() if field.alias == name]
    return field


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, ApiModel)


FIXED_RULES = [
    *(Rule(rule=_is_as_before(part), message=_REMEDY, field_path=f".{part}") for part in IMMUTABLE),
    Rule(
        rule=(
            "self.schedule == oldSelf.schedule || "
            "(self.schedule.mode != 'OneStepOff' && oldSelf.schedule.mode != 'OneStepOff')"
        ),
        message=_MODE_REMEDY,
        field_path=".schedule",
    ),
]
"""Rules of the policy for an accepted job."""


def fixed_changes(old: PPOJobSpec, new: PPOJobSpec) -> Iterator[Problem]:
    """Yield each fixed part of an accepted job's spec that differs in `new`."""
    before, after = old.to_wire(), new.to_wire()
    for part in IMMUTABLE:
        if _fixed(before, part) != (value := _fixed(after, part)):
            # Objects and lists are only named: they are long, and may hold passwords.
            yield part, None if isinstance(value, dict | list) else value, _REMEDY
    modes = {old.schedule.mode, new.schedule.mode}
    if old.schedule != new.schedule and ScheduleMode.ONE_STEP_OFF in modes:
        yield "schedule.mode", new.schedule.mode.value, _MODE_REMEDY


def _fixed(wire: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path, without the fields below it that may change."""
    value: Any = wire
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not any(mutable.startswith(f"{path}.") for mutable in MUTABLE):
        return value
    fields = (name for name in value if f"{path}.{name}" not in MUTABLE)
    # A section of which only mutable fields are set is as good as none.
    return {name: fixed for name in fields if (fixed := _fixed(wire, f"{path}.{name}")) != {}}
