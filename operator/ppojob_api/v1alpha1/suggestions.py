"""Which field of a spec may be meant by a name that this version does not have; `validation` calls it."""

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ppojob_api.v1alpha1.spec import PPOJobSpec

_CUTOFF = 0.75
"""Ratio of `difflib` from which two names are similar: a letter too many, a letter missing, two letters swapped."""
_MOST = 3
"""More sections than this with a field of the same name are no help."""


def suggestion(path: str) -> str | None:
    """Return a field that may be meant, or several with `or` between them; None if no name is similar.

    A field of the same name in other sections comes first, with its whole path: the indentation is probably wrong.
    Otherwise it is the field of the same section with the most similar name.

    Args:
        path: of the unknown field, such as `spec.pools[0].nodez`.
    """
    section, _, name = re.sub(r"\[\d+\]", "[]", path).rpartition(".")
    wanted = _folded(name)
    elsewhere = [field for field in _fields() if _folded(field.rpartition(".")[2]) == wanted]
    siblings = {_folded(field.rpartition(".")[2]): field for field in _fields() if field.rpartition(".")[0] == section}
    if wanted not in siblings and elsewhere:
        steps = set(section.split("."))
        shared = {field: len(steps & set(field.split("."))) for field in elsewhere}
        nearest = [field for field in elsewhere if shared[field] == max(shared.values())]
        if len(nearest) <= _MOST:
            return " or ".join(nearest)
    near = difflib.get_close_matches(wanted, siblings, n=1, cutoff=_CUTOFF)
    return siblings[near[0]].rpartition(".")[2] if near else None


def _folded(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


@cache
def _fields() -> tuple[str, ...]:
    schema = PPOJobSpec.model_json_schema(by_alias=True)
    return tuple(sorted(set(_below("spec", schema, schema.get("$defs", {})))))


def _below(path: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for option in [*schema.get("anyOf", ()), *schema.get("allOf", ())]:
        yield from _below(path, option, definitions)
    if "items" in schema:
        yield from _below(f"{path}[]", schema["items"], definitions)
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from _below(f"{path}.{name}", field, definitions)
