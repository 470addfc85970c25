"""Who computes and trains a model: `engine` and `engineClass` of `spec.actor` and `spec.critic`."""

from enum import StrEnum

from pydantic import ConfigDict, Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules
from ppojob_api.v1alpha1.quantities import Path, RawObject, ShortText


class Engine(StrEnum):
    """What computes and trains a model."""

    FSDP = "FSDP"
    CLASS = "Class"


class EngineClass(ApiModel):
    """A Python class of the user, created with an `EngineSetup` and the kwargs. See docs/engines.md."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(rule="has(self.module) != has(self.path)", message="set exactly one of module and path"),
            Rule(
                rule="!has(self.path) || (self.path.startsWith('/') && self.path.endsWith('.py'))",
                message="must begin with / and end with .py: a Python file in the container",
                field_path=".path",
            ),
        )
    )

    module: ShortText | None = None
    """Dotted name of an installed module."""
    path: Path | None = None
    """Path of a Python file in the container."""
    class_name: ShortText
    """Name of the class in it."""
    kwargs: RawObject = Field(default_factory=dict)
    """Keyword arguments of the class."""
