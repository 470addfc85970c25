"""`--set path=value`: one value of a PPOJob, given on the command line.

`manifest.py` applies it to the raw document, before the checks that every PPOJob goes through. The path is looked up in
the schema, so that a slip of the finger is refused with the names that are there.
"""

import difflib
import re
from functools import cache
from typing import Any

import yaml

from ppojob_api.v1alpha1.schema import Schema, structural
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import FieldError, SpecError
from ppojob_trainer.commands.kubernetes_yaml import parse

_PART = re.compile(r"((?:[^.\[\]\\]|\\.)+)|\[(\d+)\]|(\.)")
_ANYTHING: Schema = {"x-kubernetes-preserve-unknown-fields": True}


def apply_override(manifest: dict[str, Any], text: str) -> None:
    r"""Set one value in a raw PPOJob.

    `trainer.seed=2` and `spec.trainer.seed=2` mean the same; `pools.actor.nodes=2` and `pools[0].nodes=2` too, if the
    first pool is called actor. A dot within a key is written `\.`. The value is YAML; `null` takes the field out.

    Raises:
        SpecError: the text is no `path=value`, or there is no such field.
    """
    path, equals, value_text = text.partition("=")
    parts = _split(path.strip())
    if not equals or not parts:
        raise _error(text, None, "write --set path=value, such as --set trainer.totalSteps=4")
    try:
        value = parse(value_text) if value_text else ""
    except yaml.YAMLError as error:
        raise _error(path, value_text, f"the value is not YAML: {' '.join(str(error).split())}") from error
    root = parts if parts[0] in ("spec", "metadata") else ["spec", *parts]
    _set(manifest, root, value)


@cache
def _schema() -> Schema:
    labels = {"type": "object", "additionalProperties": {"type": "string"}}
    metadata = {"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": labels, "annotations": labels}
    return {
        "type": "object",
        "properties": {"spec": structural(PPOJobSpec), "metadata": {"type": "object", "properties": metadata}},
    }


def _split(path: str) -> list[str | int]:
    """Split `a.b[0].c` into its parts.

    Raises:
        SpecError: it is not a path.
    """
    parts: list[str | int] = []
    end = 0
    for match in _PART.finditer(path):
        if match.start() != end:
            break
        end = match.end()
        if match[1] is not None:
            parts.append(re.sub(r"\\(.)", r"\1", match[1]))
        elif match[2] is not None:
            parts.append(int(match[2]))
    if end != len(path):
        raise _error(path, None, "this is not a path: separate names by dots, and write [0] for a list's first item")
    return parts


def _set(root: dict[str, Any], parts: list[str | int], value: object) -> None:
    node: Any = root
    schema = _schema()
    for depth, part in enumerate(parts):
        where = _shown(parts[:depth])
        key, schema = _find(node, schema, part, where)
        if depth == len(parts) - 1:
            break
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = [] if schema.get("type") == "array" else {}
        node = node[key]
    if value is not None:
        node[key] = value
    elif isinstance(node, dict):
        node.pop(key, None)
    else:
        del node[key]


def _find(node: object, schema: Schema, part: str | int, where: str) -> tuple[Any, Schema]:
    """Return the key of `part` in `node`, and the schema of its value."""
    if isinstance(node, list):
        return _find_item(node, part, where), schema.get("items", _ANYTHING)
    if not isinstance(node, dict):
        raise _error(where, node, f"this is a value, it has no field {part}")
    if isinstance(part, int):
        raise _error(where, None, f"this is not a list: write a field name instead of [{part}]")
    fields = schema.get("properties")
    if fields is None:
        return part, schema.get("additionalProperties", _ANYTHING)
    if part not in fields:
        near = difflib.get_close_matches(part, fields, n=3, cutoff=0.5) or sorted(fields)
        raise _error(f"{where}.{part}" if where else part, None, f"there is no such field: did you mean {_or(near)}?")
    return part, fields[part]


def _find_item(items: list[Any], part: str | int, where: str) -> int:
    if isinstance(part, int) or part.isdigit():
        if int(part) < len(items):
            return int(part)
        raise _error(f"{where}[{part}]", None, f"the list has {len(items)} items; the first is [0]")
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if part in names:
        return names.index(part)
    known = _or([name for name in names if name]) or "none"
    raise _error(f"{where}.{part}", None, f"the list has no item of this name; there is {known}")


def _shown(parts: list[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")


def _or(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _error(path: str, value: object, message: str) -> SpecError:
    return SpecError([FieldError(f"--set {path}", value, message)])
