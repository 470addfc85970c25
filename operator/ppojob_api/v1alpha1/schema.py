"""From the pydantic models to the CRD: a structural OpenAPI v3 schema with defaults, bounds and CEL rules.

`generate.py` calls it. Rules on the whole spec are in `policy.py`. Fields that a template may set have no stored
defaults. It refuses what a structural schema cannot say, so
that a field never loses its bounds silently. Source of the rules: Kubernetes' documentation of structural schemas
(apiextensions.k8s.io/v1).
"""

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.base import rules
from ppojob_api.v1alpha1.rules import RULES_OF
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_api.v1alpha1.template_reference import TemplateKind
from ppojob_api.v1alpha1.templates import OF_THE_JOB_ONLY, TEMPLATED, PPOJobTemplateSpec

Schema = dict[str, Any]

_COLUMNS = (
    ("Phase", "string", ".status.phase", "Where the job is in its life"),
    ("Step", "integer", ".status.progress.step", "Steps done"),
    ("Progress", "integer", ".status.progress.percentage", "Share of the steps that are done, in percent"),
    ("Reward", "string", ".status.progress.reward", "Mean score of the last step"),
    ("Ready", "string", ".status.ready", "GPUs ready / requested"),
    ("Retries", "integer", ".status.retries.total", "Attempts that failed and were tried again"),
    ("Age", "date", ".metadata.creationTimestamp", ""),
    ("GPU-Hours", "string", ".status.gpuUsage.gpuHours", "GPU-hours for which the job has held GPUs"),
    ("Idle", "string", ".status.gpuUsage.idleGPUHours", "Idle GPU-hours of them"),
)
_TEMPLATE_COLUMNS = (
    ("Image", "string", ".spec.template.image", "Trainer image"),
    ("Pools", "string", ".spec.template.pools[*].name", "Pools that a job may name"),
    ("Queue", "string", ".spec.template.runPolicy.queueName", "Kueue's LocalQueue"),
    ("Max-GPUs", "integer", ".spec.limits.maxGPUs", "Largest number of GPUs of a job"),
    ("Age", "date", ".metadata.creationTimestamp", ""),
)
_REQUIRED_SOMEWHERE = "Required, here or in the template."
_TEMPLATES = {
    TemplateKind.NAMESPACED: ("Namespaced", "those in its namespace"),
    TemplateKind.CLUSTER: ("Cluster", "those in any namespace"),
}
_WIDE_COLUMNS = ("GPU-Hours", "Idle")
"""Shown by `kubectl get --output=wide` only."""

_DROPPED = {"title", "additionalProperties"}
_KEPT = {
    "type", "format", "description", "default", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "maxProperties", "required", "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-int-or-string", "x-kubernetes-map-type", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-validations",
}  # fmt: skip


class _WithRules(GenerateJsonSchema):
    """Puts the rules on a section of the spec into that section's schema."""

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        return super().model_schema(schema) | rules(*RULES_OF.get(schema["cls"], []))


def structural(model: type[BaseModel]) -> Schema:
    """Return the structural schema of a model.

    Raises:
        ValueError: the model uses something that a structural schema cannot express.
    """
    raw = model.model_json_schema(by_alias=True, mode="validation", schema_generator=_WithRules)
    return _convert(raw, raw.get("$defs", {}), model.__name__)


def custom_resource_definitions() -> list[Schema]:
    """Return the CustomResourceDefinitions of PPOJob, PPOJobTemplate and ClusterPPOJobTemplate."""
    return [custom_resource_definition(), *(_template_definition(kind) for kind in TemplateKind)]


def custom_resource_definition() -> Schema:
    """Return the CustomResourceDefinition of PPOJob."""
    root: Schema = {
        "type": "object",
        "description": "PPOJob trains a language model with PPO; each role gets the GPUs of a pool.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {
                "type": "object",
                "properties": {
                    "name": {
                        "type": "string",
                        "maxLength": constants.NAME_MAX_LENGTH,
                        "pattern": f"^{constants.NAME_PATTERN.pattern}$",
                    }
                },
            },
            "spec": _stored_spec(),
            "status": structural(PPOJobStatus),
        },
    }
    version = {
        "name": constants.VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": _columns(_COLUMNS),
        "schema": {"openAPIV3Schema": root},
    }
    return _definition(
        constants.KIND, "Namespaced", version, {"shortNames": constants.SHORT_NAMES, "categories": constants.CATEGORIES}
    )


def _template_definition(kind: TemplateKind) -> Schema:
    scope, words = _TEMPLATES[kind]
    root: Schema = {
        "type": "object",
        "description": f"{kind.value} has defaults and limits of PPOJobs that name it in spec.templateRef: {words}.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(PPOJobTemplateSpec),
        },
    }
    version = {
        "name": constants.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": _columns(_TEMPLATE_COLUMNS),
        "schema": {"openAPIV3Schema": root},
    }
    return _definition(kind.value, scope, version, {})


def _definition(kind: str, scope: str, version: Schema, names: Schema) -> Schema:
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{constants.GROUP}"},
        "spec": {
            "group": constants.GROUP,
            "scope": scope,
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower(), **names},
            "versions": [version],
        },
    }


def _columns(columns: Sequence[tuple[str, str, str, str]]) -> list[Schema]:
    return [
        {"name": name, "type": kind, "jsonPath": path}
        | ({"description": text} if text else {})
        | ({"priority": 1} if name in _WIDE_COLUMNS else {})
        for name, kind, path, text in columns
    ]


def _stored_spec() -> Schema:
    """Return the schema of a job's spec as the API server stores it: without what a template may set.

    A stored default would take precedence over the template, and what is required may be in the template alone.
    """
    schema = structural(PPOJobSpec)
    fields = schema["properties"]
    for name in TEMPLATED:
        fields[name] = _without_defaults(fields[name], name)
    pool, storage = fields["pools"]["items"], fields["storage"]
    for section, kept in ((schema, set(schema["properties"]) - set(TEMPLATED)), (pool, {"name"}), (storage, set())):
        for name in set(section["required"]) - kept:
            field = section["properties"][name]
            field["description"] = f"{field.get('description', '')} {_REQUIRED_SOMEWHERE}".strip()
        section["required"] = [name for name in section["required"] if name in kept]
    del storage["required"]
    return schema


def _without_defaults(schema: Schema, path: str) -> Schema:
    """Return the schema of a field with its default in the description only: `PPOJobSpec` fills it in."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {
            name: inner if f"{path}.{name}" in OF_THE_JOB_ONLY else _without_defaults(inner, f"{path}.{name}")
            for name, inner in schema["properties"].items()
        }
    elif "default" in schema:
        result["description"] = f"{schema.get('description', '')} Default: {json.dumps(result.pop('default'))}.".strip()
    if path == "pools":
        result["items"] = _without_defaults(schema["items"], "pools[]")
    return result


def _convert(raw: Schema, definitions: Schema, path: str) -> Schema:
    raw = _unwrap_optional(_inline(raw, definitions), definitions, path)
    result = {key: value for key, value in raw.items() if key in _KEPT}
    if "const" in raw:
        result["enum"] = [raw["const"]]
    for bound, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if flag in raw:
            result |= {bound: raw[flag], flag: True}
    if "description" in result:
        result["description"] = " ".join(str(result["description"]).split())
    if "properties" in raw:
        result["properties"] = {
            name: _convert(value, definitions, f"{path}.{name}") for name, value in raw["properties"].items()
        }
    if "items" in raw:
        result["items"] = _convert(raw["items"], definitions, f"{path}[]")
    if isinstance(raw.get("additionalProperties"), dict):
        result["additionalProperties"] = _convert(raw["additionalProperties"], definitions, f"{path}{{}}")
    _refuse_unknown_keywords(raw, path)
    return _with_default(result)


def _inline(raw: Schema, definitions: Schema) -> Schema:
    """Replace a reference by its target; fields beside it (description, default) win."""
    if "$ref" not in raw:
        return raw
    beside = {key: value for key, value in raw.items() if key != "$ref"}
    return {**definitions[raw["$ref"].rpartition("/")[2]], **beside}


def _unwrap_optional(raw: Schema, definitions: Schema, path: str) -> Schema:
    """Turn `anyOf: [X, null]` into X: absence is the only "none" that the API server knows."""
    if "anyOf" not in raw:
        return raw
    choices = [choice for choice in raw["anyOf"] if choice.get("type") != "null"]
    if len(choices) != 1:
        raise ValueError(
            f"{path}: a union has no structural form; use a type enum and one optional block for each type"
        )
    beside = {key: value for key, value in raw.items() if key not in ("anyOf", "default")}
    return {**_inline(choices[0], definitions), **beside}


def _with_default(schema: Schema) -> Schema:
    """Give an object that may be absent the default {}, so that the defaults inside it are applied."""
    if schema.get("default") is None:
        schema.pop("default", None)
    elif schema.get("type") == "object" and "properties" in schema:
        schema["default"] = {}
    return schema


def _refuse_unknown_keywords(raw: Schema, path: str) -> None:
    handled = {"properties", "items", "const", "exclusiveMinimum", "exclusiveMaximum", "$defs"}
    unknown = set(raw) - _KEPT - _DROPPED - handled
    if unknown:
        raise ValueError(f"{path}: {sorted(unknown)} cannot be expressed in a structural schema; change the model")
