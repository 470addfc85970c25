"""An older trainer reads what today's operator sends: job.json of every example, and replies, by its recorded schemas.

A trainer refuses fields of the spec that it does not know, and ignores others. So the operator may send it nothing in
the spec but what it knows, or what the user has set. A default that has changed would be another one in the trainer,
because job.json has no defaults.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ppojob_api.v1alpha1.progress import Command, ProgressReply
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_api.v1alpha1.templates import completed
from tests.contracts import COMPATIBLE, FOLDER
from tests.examples import EXAMPLES, name_of, template_of
from tests.golden.golden_manifests import golden_files
from tests.unit.api.test_other_versions import leaves
from tools.release.contract import sample

CHANGED_DEFAULTS: dict[str, set[str]] = {}
"""By version: fields whose default has changed since, such as `.spec.checkpoint.async`."""
_INDEX = re.compile(r"\[\d+\]")


def reader(version: str, model: str) -> dict[str, Any]:
    """Return the schema of what the trainer of a version reads."""
    found: dict[str, Any] = json.loads((FOLDER / version / f"reader-{model}.json").read_text())
    return found


@dataclass(frozen=True)
class Problem:
    """What a reader does not accept in a message."""

    path: str
    is_unknown: bool
    """It is a field that the reader does not know. Otherwise, it is a value."""


def problems(schema: dict[str, Any], message: Any) -> set[Problem]:
    """Return what a reader does not accept in a message."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(message)
    return {problem for error in errors for problem in _problems(error)}


def _problems(error: jsonschema.ValidationError) -> Iterator[Problem]:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path)
    if error.validator == "additionalProperties":
        unknown = set(error.instance) - set(error.schema.get("properties", {}))
        yield from (Problem(f"{path}.{name}", is_unknown=True) for name in unknown)
        return
    # Of the branches of a union, those of another type say nothing.
    inner = [each for each in error.context or () if each.validator != "type" or each.path]
    for each in inner:
        yield from _problems(each)
    if not inner:
        yield Problem(path, is_unknown=False)


def is_set(spec: Any, path: str) -> bool:
    """Return whether a user has set the field of a path, in any item of lists."""
    found = [spec]
    for name in _INDEX.sub("", path.removeprefix(".spec")).split(".")[1:]:
        items = [item for each in found for item in (each if isinstance(each, list) else [each])]
        found = [each[name] for each in items if isinstance(each, dict) and name in each]
    return bool(found)


def defaults(schema: dict[str, Any], node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the default of each field of a schema."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    for branch in node.get("anyOf", ()):
        yield from defaults(schema, branch, path)
    if isinstance(node.get("items"), dict):
        yield from defaults(schema, node["items"], path)
    for name, child in node.get("properties", {}).items():
        if "default" in child:
            yield from leaves(child["default"], f"{path}.{name}").items()
        yield from defaults(schema, child, f"{path}.{name}")


def test_every_version_that_is_supported_has_recorded_readers() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/reader-JobFile.json")} >= set(COMPATIBLE)
    assert {path.parent.name for path in FOLDER.glob("*/reader-ProgressReply.json")} >= set(COMPATIBLE)


@pytest.mark.parametrize("version", COMPATIBLE)
@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_older_trainer_knows_all_that_the_user_has_not_set(version: str, example: Path) -> None:
    sent = json.loads(yaml.safe_load(golden_files(example)["config-map.yaml"])["data"]["job.json"])
    template = template_of(example)
    spec = yaml.safe_load(example.read_text())["spec"]
    given = spec if template is None else completed(spec, template["spec"])

    found = problems(reader(version, "JobFile"), sent)

    in_spec = {problem for problem in found if problem.path.startswith(".spec.")}
    assert {problem for problem in in_spec if not is_set(given, problem.path)} == set()
    # Elsewhere, the trainer ignores fields that it does not know.
    assert all(problem.is_unknown for problem in found - in_spec)


@pytest.mark.parametrize("version", COMPATIBLE)
def test_an_older_trainer_has_the_same_defaults(version: str) -> None:
    old, new = reader(version, "JobFile"), JobFile.model_json_schema(by_alias=True)
    before, after = dict(defaults(old, old)), dict(defaults(new, new))

    # The operator alone reads the run policy.
    read = {path for path in before.keys() & after.keys() if not path.startswith(".spec.runPolicy.")}
    changed = {path for path in read if before[path] != after[path]}

    assert changed == CHANGED_DEFAULTS.get(version, set())


@pytest.mark.parametrize(("version", "command"), list(product(COMPATIBLE, Command)))
@pytest.mark.parametrize("is_full", [True, False])
def test_an_older_trainer_reads_the_replies_of_todays_operator(version: str, command: Command, is_full: bool) -> None:
    reply = sample(ProgressReply, is_full=is_full).model_copy(update={"command": command})
    schema, sent = reader(version, "ProgressReply"), reply.model_dump(mode="json", by_alias=True, exclude_none=True)

    # The trainer ignores fields that it does not know, at any depth.
    assert all(problem.is_unknown for problem in problems(schema, sent))


def test_a_field_that_nobody_has_set_would_be_found() -> None:
    schema = reader(COMPATIBLE[-1], "JobFile")
    [example] = [each for each in EXAMPLES if name_of(each) == "01-quickstart"]
    sent = json.loads(yaml.safe_load(golden_files(example)["config-map.yaml"])["data"]["job.json"])
    sent["spec"]["actor"]["ofANewerVersion"] = 1
    sent["spec"]["pools"][0]["spread"] = "OfANewerVersion"

    assert problems(schema, sent) >= {
        Problem(".spec.actor.ofANewerVersion", is_unknown=True),
        Problem(".spec.pools[0].spread", is_unknown=False),
    }
    assert not is_set({"actor": {"betas": [0.9]}}, ".spec.actor.ofANewerVersion")
    assert is_set({"pools": [{"a": 1}, {"spread": "x"}]}, ".spec.pools[1].spread")
