"""The field reference: one table row for each field of spec and status, from the structural schema."""

from collections.abc import Iterator
from typing import Any

from ppojob_api.v1alpha1.schema import structural
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import PPOJobStatus


def field_reference() -> str:
    """Return the reference as Markdown."""
    parts = ["# Fields of a PPOJob\n\nThe same texts as `kubectl explain ppojob.spec --recursive`.\n"]
    for title, model in (("spec", PPOJobSpec), ("status", PPOJobStatus)):
        rows = "\n".join(_rows(title, structural(model)))
        parts.append(f"\n## {title}\n\n| field | type | default | meaning |\n|---|---|---|---|\n{rows}\n")
    return "".join(parts)


def _rows(path: str, schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        default = "required" if name in required else _default(field)
        yield f"| `{where}` | {_type(field)} | {default} | {field.get('description', '')} |"
        yield from _rows(where, field)
        if field.get("type") == "array":
            yield from _rows(f"{where}[]", field["items"])


def _default(field: dict[str, Any]) -> str:
    return "" if field.get("default") in (None, {}, []) else f"`{field['default']}`"


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    low = f" > {field['minimum']}" if field.get("exclusiveMinimum") else f" ≥ {field.get('minimum')}"
    bounds = (low if "minimum" in field else "") + (f" ≤ {field['maximum']}" if "maximum" in field else "")
    kind = "quantity" if field.get("x-kubernetes-int-or-string") else field.get("type", "")
    return f"{kind}{bounds}"
