"""The field reference: a section for each part of spec and status with a table row for each field.

Built from the structural schema. `generate` calls it.
"""

from collections.abc import Iterator
from typing import Any

from ppojob_api.v1alpha1.schema import structural
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_api.v1alpha1.templates import PPOJobTemplateSpec

_HEAD = """# Fields of a PPOJob

`kubectl explain` shows the same texts, for example `kubectl explain ppojob.spec.rollout`.
"""
_TABLE = "| field | type | default | meaning |\n|---|---|---|---|"
_TEMPLATES = (
    "Templates complete the spec of a PPOJob: [Templates](templates.md). Their fields `template` and `poolDefaults` "
    "have the fields of `spec` and `spec.pools[]` above."
)
_AS_IN_SPEC = {f"status.effectiveLayout.{part}": f"spec.{part}" for part in ("pools", "placement", "schedule")}
"""Parts of the status with the same fields as a part of the spec."""


def field_reference() -> str:
    """Return the reference as Markdown."""
    sections = [_HEAD]
    template = structural(PPOJobTemplateSpec)
    for part in ("template", "poolDefaults"):
        # Its fields are those of a PPOJob.
        template["properties"][part].pop("properties")
    for title, model in (("spec", PPOJobSpec), ("status", PPOJobStatus)):
        schema = structural(model)
        plain = {name: field for name, field in schema["properties"].items() if not _inner(field)}
        sections.append(_section(title, "", [*_rows(title, {**schema, "properties": plain})]))
        for name, field in schema["properties"].items():
            if name not in plain:
                default = f"{_type(field)}, required" if name in schema.get("required", []) else _type(field)
                path = f"{title}.{name}"
                rows = [*_rows(f"{path}[]" if field.get("type") == "array" else path, _inner(field))]
                sections.append(_section(path, f"{field.get('description', '')} ({default})", rows))
    sections.append(_section("PPOJobTemplate and ClusterPPOJobTemplate", _TEMPLATES, [*_rows("spec", template)]))
    return "\n".join(sections)


def _section(title: str, words: str, rows: list[str]) -> str:
    return "\n".join([f"## {title}\n", *([f"{words}\n"] if words else []), _TABLE, *rows, ""])


def _inner(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with the fields below a field: its own, or that of its items; empty where there are none."""
    inner: dict[str, Any] = field["items"] if field.get("type") == "array" else field
    return inner if "properties" in inner else {}


def _rows(path: str, schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        default = "required" if name in required else _default(field)
        same = f" Fields: see {_AS_IN_SPEC[where]}." if where in _AS_IN_SPEC else ""
        yield f"| `{where}` | {_type(field)} | {default} | {field.get('description', '')}{same} |"
        if not same:
            yield from _rows(f"{where}[]" if field.get("type") == "array" else where, _inner(field))


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value in (None, {}, []):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "empty"


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    low = f" > {field['minimum']}" if field.get("exclusiveMinimum") else f" ≥ {field.get('minimum')}"
    bounds = (low if "minimum" in field else "") + (f" ≤ {field['maximum']}" if "maximum" in field else "")
    kind = "quantity" if field.get("x-kubernetes-int-or-string") else field.get("type", "")
    return f"{kind}{bounds}"
