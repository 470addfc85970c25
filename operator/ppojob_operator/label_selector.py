"""A Kubernetes LabelSelector: parsed from JSON, validated, and written as the query that the API server evaluates.

`settings.py` parses the one of the namespaces. Nothing here evaluates a selector: the API server does, in lists and
watches, so the operator and `kubectl get namespaces --selector` always agree.
"""

import re
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_PREFIX = r"(?=[^/]{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/"
_LABEL_NAME = re.compile(rf"({_PREFIX})?{_NAME}")
_LABEL_VALUE = re.compile(rf"({_NAME})?")


def _valid_name(name: object) -> object:
    if isinstance(name, str) and _LABEL_NAME.fullmatch(name):
        return name
    raise ValueError(
        "not the name of a label: write a name of at most 63 letters, digits, '-', '_' and '.', with a letter or a "
        "digit at both ends, after an optional DNS name and '/', such as ppojob.dev/enabled"
    )


def _valid_value(value: object) -> object:
    if isinstance(value, str) and _LABEL_VALUE.fullmatch(value):
        return value
    raise ValueError(
        "not the value of a label: write a string of at most 63 letters, digits, '-', '_' and '.', with a letter or a "
        'digit at both ends; quote numbers and true or false, such as "true" (helm: --set-string)'
    )


LabelName = Annotated[str, BeforeValidator(_valid_name)]
LabelValue = Annotated[str, BeforeValidator(_valid_value)]


class Operator(StrEnum):
    """How a requirement compares a label."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Requirement(_Part):
    """One of `matchExpressions`."""

    key: LabelName
    operator: Operator
    values: tuple[LabelValue, ...] = ()

    @model_validator(mode="after")
    def _values_fit_the_operator(self) -> "Requirement":
        needs_values = self.operator in (Operator.IN, Operator.NOT_IN)
        if needs_values and not self.values:
            raise ValueError(f"operator {self.operator} needs values: name one at least, or use Exists or DoesNotExist")
        if self.values and not needs_values:
            raise ValueError(f"operator {self.operator} compares no values: remove them, or use In or NotIn")
        return self

    def __str__(self) -> str:
        """Return the requirement as the API server's query has it."""
        values = f"({','.join(self.values)})"
        return {
            Operator.IN: f"{self.key} in {values}",
            Operator.NOT_IN: f"{self.key} notin {values}",
            Operator.EXISTS: self.key,
            Operator.DOES_NOT_EXIST: f"!{self.key}",
        }[self.operator]


class LabelSelector(_Part):
    """What labels must be like; all requirements must hold, and without any the selector matches everything."""

    match_labels: dict[LabelName, LabelValue] = Field(default_factory=dict, alias="matchLabels")
    match_expressions: tuple[Requirement, ...] = Field(default=(), alias="matchExpressions")

    def __bool__(self) -> bool:
        """Return whether there is a requirement."""
        return bool(self.match_labels or self.match_expressions)

    def __str__(self) -> str:
        """Return the selector as a list or a watch of the API server and `kubectl --selector` take it."""
        equal = [f"{name}={value}" for name, value in sorted(self.match_labels.items())]
        return ",".join([*equal, *map(str, self.match_expressions)])
