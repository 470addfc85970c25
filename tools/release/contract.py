"""`python -m tools.release.contract`: record what operator and trainer of this version send each other.

`make contract` calls it at a release. tests/contracts/VERSION gets the job.json of every example (from the golden
ConfigMaps), a full and a minimal message of each kind, and the schemas of what the trainer reads. Tests read the files
of the last versions with today's code, and compare what today's operator sends with the schemas.

For an older version, run this file with that version's package and tree:
`PYTHONPATH=TREE/operator python tools/release/contract.py --tree TREE --output tests/contracts/VERSION`.
So it imports nothing of ours but `ppojob_api`, and finds the fields of a message in its model.
"""

import argparse
import json
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from ppojob_api.v1alpha1 import progress
from ppojob_api.v1alpha1.resolve import JobFile

KINDS = ("ProgressReport", "FetchReport", "ProgressReply", "FailureRecord")
"""Models of `ppojob_api.v1alpha1.progress`; an older version has fewer."""
READ_BY_THE_TRAINER: tuple[type[BaseModel], ...] = (JobFile, progress.ProgressReply)
"""Models of which an older trainer reads what a newer operator sends."""
_TIME = "2026-01-31T12:00:00Z"


def main() -> int:
    """Write the contract; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.release.contract", description=__doc__)
    parser.add_argument("--tree", type=Path, default=Path(), help="the version's clone (default: this folder)")
    parser.add_argument("--output", type=Path, help="default: tests/contracts/VERSION")
    arguments = parser.parse_args()
    version = tomllib.loads((arguments.tree / "pyproject.toml").read_text())["project"]["version"]
    output = arguments.output or Path("tests/contracts") / version
    record(arguments.tree, output)
    sys.stdout.write(f"{output}\n")
    return 0


def record(tree: Path, output: Path) -> None:
    """Write the contract of the version in `tree`, whose `ppojob_api` is imported."""
    shutil.rmtree(output, ignore_errors=True)
    (output / "jobs").mkdir(parents=True)
    for path in sorted((tree / "tests" / "golden").glob("*/config-map.yaml")):
        text = yaml.safe_load(path.read_text())["data"]["job.json"]
        (output / "jobs" / f"{path.parent.name}.json").write_text(f"{text}\n")
    for kind in KINDS:
        model = getattr(progress, kind, None)
        if model is None:
            continue
        for name, is_full in (("full", True), ("least", False)):
            message = sample(model, is_full=is_full).model_dump(mode="json", by_alias=True, exclude_none=True)
            (output / f"{kind}-{name}.json").write_text(json.dumps(message, indent=1, sort_keys=True) + "\n")
    for model in READ_BY_THE_TRAINER:
        schema = _without_words(model.model_json_schema(by_alias=True))
        (output / f"reader-{model.__name__}.json").write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n")


def _without_words(node: Any) -> Any:
    """Return a schema without its descriptions and titles. A property may have these names."""
    if isinstance(node, list):
        return [_without_words(item) for item in node]
    if not isinstance(node, dict):
        return node
    words = {name for name in ("description", "title") if isinstance(node.get(name), str)}
    return {name: _without_words(item) for name, item in node.items() if name not in words}


def sample(model: type[BaseModel], *, is_full: bool) -> BaseModel:
    """Return a message with a value in each field, or in the required ones only."""
    schema = model.model_json_schema(by_alias=True)
    return model.model_validate(_value(schema, schema.get("$defs", {}), is_full=is_full))


def _value(node: Mapping[str, Any], definitions: Mapping[str, Any], *, is_full: bool) -> Any:
    """Return a value that a schema allows."""
    if "$ref" in node:
        return _value(definitions[node["$ref"].rpartition("/")[2]], definitions, is_full=is_full)
    if "anyOf" in node:
        return _value(next(each for each in node["anyOf"] if each.get("type") != "null"), definitions, is_full=is_full)
    if node.get("type") == "array":
        return [_value(node["items"], definitions, is_full=is_full)]
    if node.get("type") == "object":
        return _object(node, definitions, is_full=is_full)
    return _scalar(node)


def _object(node: Mapping[str, Any], definitions: Mapping[str, Any], *, is_full: bool) -> dict[str, Any]:
    if "properties" not in node:
        return {"name": _value(node["additionalProperties"], definitions, is_full=is_full)}
    fields = node["properties"]
    names = fields if is_full else node.get("required", [])
    found = {name: _value(fields[name], definitions, is_full=is_full) for name in names}
    # The operator reads times, which the schema does not mark.
    return {name: _TIME if name.lower().endswith("time") else value for name, value in found.items()}


def _scalar(node: Mapping[str, Any]) -> Any:
    if "enum" in node:
        return node["enum"][-1]
    kind = node["type"]
    if kind == "string":
        return "x" * max(1, node.get("minLength", 1))
    return {"integer": max(1, node.get("minimum", 1)), "number": 0.5, "boolean": True}[kind]


if __name__ == "__main__":
    sys.exit(main())
