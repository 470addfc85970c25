"""From a raw mapping to a checked spec, or to every problem that it has, each with its field's path.

The operator, `ppojob validate` and `ppojob run` call it, so that the same file gets the same answer everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.rules import check
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.spelling import REMEDY_OF
from ppojob_api.v1alpha1.suggestions import suggestion

UNKNOWN_FIELD = "there is no such field: correct its name or remove it"
"""How the message on a field begins that this version does not have; a similar field may follow."""
MISSING_FIELD = "this field is required: add it"
QUEUE_LABEL_PATH = f"metadata.labels[{constants.LABEL_QUEUE}]"
_NOT_FILLED_IN = "default_factory_not_called"
"""Pydantic's type of error for a default that depends on a field that has an error itself."""
_SECTION = "must be a section with fields: add them, or remove it"
_REMEDIES = {
    "missing": MISSING_FIELD,
    "model_type": _SECTION,
    "model_attributes_type": _SECTION,
    "dict_type": _SECTION,
}
"""Messages that replace those of pydantic, by its type of error."""
_WHOLE_NUMBER = "write a whole number, without quotes and without a unit"
_HINTS = {
    "int_type": _WHOLE_NUMBER,
    "int_parsing": _WHOLE_NUMBER,
    "int_from_float": _WHOLE_NUMBER,
    "float_type": "write a number, without quotes and without a unit",
    "bool_type": "write true or false, without quotes",
    "string_type": "write it in quotes",
    "list_type": "write it as a list, [a, b], or with `- ` before each item",
}
"""Remedies that follow the messages of pydantic, by its type of error."""


@dataclass(frozen=True)
class FieldError:
    """What is wrong with one field."""

    path: str
    value: object
    message: str

    def __str__(self) -> str:
        """Return `path: value: message`."""
        shown = "" if self.value is None else f" {self.value!r}:"
        return f"{self.path}:{shown} {self.message}"


class SpecError(ValueError):
    """A spec that cannot be run; `errors` has every problem that was found."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = tuple(errors)


def parse_spec(raw: Mapping[str, Any], *, is_accepted: bool = False) -> PPOJobSpec:
    """Return the checked spec.

    Args:
        is_accepted: see `rules.check`.

    Raises:
        SpecError: with every problem: each field's path, its value, and what would be right.
    """
    try:
        # Names of Python are not names of the API: the API server refuses `max_num_seqs`, too.
        spec = PPOJobSpec.model_validate(raw, by_alias=True, by_name=False)
    except ValidationError as error:
        raise SpecError(explained(error)) from error
    problems = [
        FieldError(f"spec.{path}", value, message) for path, value, message in check(spec, is_accepted=is_accepted)
    ]
    if problems:
        raise SpecError(problems)
    return spec


def with_queue(raw: Mapping[str, Any], label: str | None) -> Mapping[str, Any]:
    """Return a spec as it is on the wire, with the queue that the job's label names.

    Args:
        raw: the spec.
        label: value of the label kueue.x-k8s.io/queue-name; None or empty: the job has none.

    Raises:
        SpecError: `spec.runPolicy.queueName` names another queue.
    """
    if not label or not isinstance(raw, Mapping) or not isinstance(policy := raw.get("runPolicy", {}), Mapping):
        # There is no queue, or this is not a spec, which `parse_spec` says better.
        return raw
    given = policy.get("queueName")
    if given not in (None, label):
        remedy = f"spec.runPolicy.queueName is {given!r}: remove one of the two, or set both to the same value"
        raise SpecError([FieldError(QUEUE_LABEL_PATH, label, remedy)])
    return {**raw, "runPolicy": {**policy, "queueName": label}}


def parse_manifest(
    raw: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], PPOJobSpec] = parse_spec
) -> tuple[str, str, PPOJobSpec]:
    """Return namespace, name and checked spec of a whole PPOJob, as a user writes it in a file.

    Args:
        raw: the PPOJob.
        parse: returns the checked spec; another one than `parse_spec` completes it with a template first.

    Raises:
        SpecError: with every problem that was found.
    """
    wanted = {"apiVersion": constants.API_VERSION, "kind": constants.KIND}
    errors = [
        FieldError(key, raw.get(key), f"must be {value}") for key, value in wanted.items() if raw.get(key) != value
    ]
    known = {*wanted, "metadata", "spec", "status"}
    errors += [FieldError(str(key), None, UNKNOWN_FIELD) for key in raw if key not in known]
    metadata, spec = raw.get("metadata"), raw.get("spec")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        errors.append(FieldError("metadata.name", None, MISSING_FIELD))
    elif not constants.NAME_PATTERN.fullmatch(metadata["name"]):
        errors.append(FieldError("metadata.name", metadata["name"], constants.NAME_REMEDY))
    if not isinstance(spec, Mapping):
        errors.append(FieldError("spec", spec, MISSING_FIELD))
    if errors or not isinstance(metadata, Mapping) or not isinstance(spec, Mapping):
        raise SpecError(errors)
    labels = metadata.get("labels")
    queue = labels.get(constants.LABEL_QUEUE) if isinstance(labels, Mapping) else None
    return str(metadata.get("namespace", "default")), metadata["name"], parse(with_queue(spec, queue))


def explained(error: ValidationError) -> list[FieldError]:
    """Return the problems that pydantic found in a spec, with the words of this package."""
    # A template has other fields than a job, so a field of a job would be no remedy.
    suggests = error.title == PPOJobSpec.__name__
    details = error.errors(include_url=False)
    return [_explain(detail, suggests) for detail in details if detail["type"] != _NOT_FILLED_IN]


def _explain(detail: ErrorDetails, suggests: bool) -> FieldError:
    path = "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])
    value = None if detail["type"] == "missing" else detail["input"]
    if detail["type"] == "string_pattern_mismatch":
        return FieldError(path, _short(value), REMEDY_OF[detail["ctx"]["pattern"]])
    return FieldError(path, _short(value), _message(detail, path, suggests))


def _message(detail: ErrorDetails, path: str, suggests: bool) -> str:
    kind = detail["type"]
    if kind == "extra_forbidden":
        meant = suggestion(path) if suggests else None
        return f"{UNKNOWN_FIELD}; did you mean {meant}?" if meant else UNKNOWN_FIELD
    hint = f": {_HINTS[kind]}" if kind in _HINTS else ""
    return _REMEDIES.get(kind, f"{detail['msg']}{hint}")


def _short(value: object) -> object:
    text = repr(value)
    return value if len(text) <= 200 else text[:197] + "..."
