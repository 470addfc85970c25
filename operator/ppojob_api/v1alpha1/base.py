"""The base class of every model on the wire: camelCase names, frozen, nothing unknown.

Every module of this package builds on it. It refuses unknown fields, because a silently ignored
hyperparameter is worse than a failure, and a scalar of another type, as the API server does.
"""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

# Types of pydantic's core schema that the API server does not convert: "16" is not an integer, 1 is not a boolean.
_STRICT = {"bool", "int", "float"}
# Parts of a core schema that take no part in validation.
_NOT_VALIDATED = {"default", "metadata", "serialization"}

# Initialisms that Kubernetes' API conventions write in capitals when they do not begin the name.
_INITIALISMS = {"Gpu": "GPU", "Url": "URL", "Cpu": "CPU", "Ttl": "TTL"}


def wire_name(field_name: str) -> str:
    """Return the name of a field on the wire: `max_tokens_per_gpu` becomes `maxTokensPerGPU`."""
    first, *rest = field_name.split("_")
    return first + "".join(_INITIALISMS.get(word, word) for word in map(str.capitalize, rest))


def _make_strict(node: object) -> None:
    if isinstance(node, list | tuple):
        for item in node:
            _make_strict(item)
    elif isinstance(node, dict):
        kind = node.get("type")
        # A dictionary of fields may have a field `type`, which is not a kind of schema but a schema itself.
        is_schema = isinstance(kind, str)
        if is_schema and kind in _STRICT:
            node.setdefault("strict", True)
        for key, value in node.items():
            if not (is_schema and key in _NOT_VALIDATED):
                _make_strict(value)


class ApiModel(BaseModel):
    """A frozen model that refuses unknown fields and converts no scalars, and speaks camelCase on the wire.

    An integer may stand where a float is wanted, and nothing else may stand for another type.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=wire_name,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make every boolean and number strict, in lists too. Enums stay as they are: strict ones refuse their text."""
        schema = handler(source)
        _make_strict(schema)
        return schema

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form: camelCase names, absent optionals left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


Problem = tuple[str, object, str]
"""Path of the field below spec, its value, and a sentence with the remedy."""


class Rule(BaseModel):
    """A rule in CEL, beside the Python check of the same meaning."""

    model_config = ConfigDict(frozen=True)

    rule: str
    """In the CRD, `self` is the value of the model that the rule is of. In the policy, it is the spec, and `oldSelf` is
    the stored spec."""
    message: str
    field_path: str = ""
    """Below `self`. The policy requires it."""
    value: str = ""
    """The value that the policy's message shows, in CEL. Empty: that of the field."""

    SCHEMA_KEY: ClassVar[str] = "x-kubernetes-validations"

    def to_schema(self) -> dict[str, str]:
        """Return the entry for the structural schema."""
        entry = {"rule": self.rule, "message": self.message}
        return {**entry, "fieldPath": self.field_path} if self.field_path else entry


def rules(*items: Rule) -> dict[str, Any]:
    """Return what carries the rules into a model's schema: its `json_schema_extra`; nothing for no rules."""
    return {Rule.SCHEMA_KEY: [item.to_schema() for item in items]} if items else {}
