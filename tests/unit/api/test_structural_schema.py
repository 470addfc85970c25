"""The CRD's schema: structural, bounded everywhere, with the defaults that Python has."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.base import Rule
from ppojob_api.v1alpha1.schema import custom_resource_definition, structural
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_api.v1alpha1.validation import parse_manifest
from tests.bad_specs import GOOD

SCHEMAS = {"spec": structural(PPOJobSpec), "status": structural(PPOJobStatus)}
PASCAL_CASE = re.compile(r"([A-Z][a-z0-9]*)+")
ACRONYMS = ("Cpu", "Cuda", "Gae", "Gpu", "Grpo", "Json", "Kai", "Kl", "Llm", "Rloo")
_AS_IN_PLACEMENT = "roles are written as the fields of placement and model are"
OTHERWISE_SPELLED = {
    "spec.telemetry.profile.roles[]": _AS_IN_PLACEMENT,
    "spec.runPolicy.failurePolicy.rules[].roles[]": _AS_IN_PLACEMENT,
}
"""Enums that are not in PascalCase, and why."""
FORBIDDEN = ("$ref", "$defs", "anyOf", "oneOf", "allOf", "title", "const", "additionalItems")


def _nodes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from _nodes(field, f"{path}.{name}")
    if "items" in schema:
        yield from _nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from _nodes(schema["additionalProperties"], f"{path}{{}}")


NODES = [node for name, schema in SCHEMAS.items() for node in _nodes(schema, name)]


def _is_choice(node: dict[str, Any]) -> bool:
    return re.fullmatch(r"\^\(\w+(\|\w+)*\)\$", node.get("pattern", "")) is not None


def _is_raw(node: dict[str, Any]) -> bool:
    return bool(node.get("x-kubernetes-preserve-unknown-fields"))


def test_nothing_is_there_that_a_structural_schema_forbids() -> None:
    assert [(path, key) for path, node in NODES for key in FORBIDDEN if key in node] == []


def test_every_node_has_a_type() -> None:
    assert [path for path, node in NODES if "type" not in node and not node.get("x-kubernetes-int-or-string")] == []


def test_every_field_is_explained() -> None:
    fields = [(path, node) for path, node in NODES if not path.endswith(("[]", "{}"))]

    assert [path for path, node in fields if "." in path and not node.get("description")] == []


def test_every_number_of_the_spec_has_both_bounds() -> None:
    nodes = _nodes(SCHEMAS["spec"], "spec")
    numbers = [(path, node) for path, node in nodes if node.get("type") in ("integer", "number")]

    assert len(numbers) > 60
    assert [path for path, node in numbers if not {"minimum", "maximum"} <= node.keys()] == []


def test_every_string_is_bounded() -> None:
    strings = [(path, node) for path, node in NODES if node.get("type") == "string" and "enum" not in node]

    assert len(strings) > 20
    assert [path for path, node in strings if "maxLength" not in node and not _is_choice(node)] == []


def test_every_list_is_bounded() -> None:
    lists = [(path, node) for path, node in NODES if node.get("type") == "array"]

    assert lists
    assert [path for path, node in lists if "maxItems" not in node] == []


def test_every_map_is_bounded() -> None:
    maps = [(path, node) for path, node in NODES if "additionalProperties" in node]

    assert maps
    assert [path for path, node in maps if "maxProperties" not in node] == []


def test_an_object_has_fields_or_is_passed_through() -> None:
    objects = [(path, node) for path, node in NODES if node.get("type") == "object"]

    assert [
        path for path, node in objects if not (node.keys() & {"properties", "additionalProperties"} or _is_raw(node))
    ] == []


def test_null_is_no_default() -> None:
    assert [path for path, node in NODES if "default" in node and node["default"] is None] == []


def test_the_api_servers_defaults_are_pythons() -> None:
    filled = _with_defaults(GOOD["spec"], SCHEMAS["spec"])

    assert filled["rollout"]["maxNumSeqs"] == 1024
    assert parse_manifest({**GOOD, "spec": filled})[2] == parse_manifest(GOOD)[2]
    # Python also writes empty lists and maps, which mean the same as their absence.
    assert filled == _without_empty(parse_manifest(GOOD)[2].to_wire())


def test_open_bounds_are_written_as_kubernetes_does() -> None:
    top_p = SCHEMAS["spec"]["properties"]["rollout"]["properties"]["topP"]

    assert (top_p["minimum"], top_p["exclusiveMinimum"]) == (0, True)


def test_rules_on_a_section_are_in_its_schema() -> None:
    rules = SCHEMAS["spec"]["properties"]["pools"]["items"][Rule.SCHEMA_KEY]

    assert any("gpusPerNode" in rule["rule"] for rule in rules)
    assert all(rule["message"] for rule in rules)


def test_no_rule_is_on_the_whole_spec_or_object() -> None:
    """Each write of the status would evaluate it; the policy has these rules."""
    root = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    assert Rule.SCHEMA_KEY not in root
    assert Rule.SCHEMA_KEY not in root["properties"]["spec"]


def test_lists_with_names_are_maps_for_server_side_apply() -> None:
    for name in ("pools", "env"):
        field = SCHEMAS["spec"]["properties"][name]
        assert (field["x-kubernetes-list-type"], field["x-kubernetes-list-map-keys"]) == ("map", ["name"])


def test_a_union_is_refused() -> None:
    class Odd(BaseModel):
        value: int | str = Field(description="x")

    with pytest.raises(ValueError, match=r"Odd\.value: a union has no structural form"):
        structural(Odd)


def test_a_keyword_without_structural_form_is_refused() -> None:
    class Odd(BaseModel):
        value: float = Field(multiple_of=0.5)

    with pytest.raises(ValueError, match=r"Odd\.value: \['multipleOf'\] cannot be expressed"):
        structural(Odd)


def test_the_crd_limits_the_name() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]
    name = version["schema"]["openAPIV3Schema"]["properties"]["metadata"]["properties"]["name"]

    assert name["maxLength"] == constants.NAME_MAX_LENGTH == 40


def test_the_columns_are_in_the_status() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]
    columns = {column["name"]: column["jsonPath"] for column in version["additionalPrinterColumns"]}

    assert list(columns) == ["Phase", "Step", "Progress", "Reward", "Ready", "Retries", "Age", "GPU-Hours", "Idle"]
    known = {path for path, _ in NODES}
    assert {path.removeprefix(".") for name, path in columns.items() if name != "Age"} <= known


ENUMS = [(path, [str(value) for value in node["enum"]]) for path, node in NODES if "enum" in node]


@pytest.mark.parametrize(("path", "values"), ENUMS, ids=[path for path, _ in ENUMS])
def test_values_of_enums_are_pascal_case_with_acronyms_in_capitals(path: str, values: list[str]) -> None:
    fitting = [
        value for value in values if PASCAL_CASE.fullmatch(value) and not any(word in value for word in ACRONYMS)
    ]

    assert fitting == ([] if path in OTHERWISE_SPELLED else values)


def test_every_exception_of_the_spelling_is_in_the_schema() -> None:
    assert set(OTHERWISE_SPELLED) <= {path for path, _ in ENUMS}


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _without_empty(item) for name, item in value.items() if item not in ({}, [])}


def _with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """Do what the API server does: put in the defaults, from the outside in."""
    if isinstance(value, list):
        return [_with_defaults(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    fields = schema["properties"]
    filled = {name: field["default"] for name, field in fields.items() if "default" in field} | value
    return {name: _with_defaults(item, fields[name]) for name, item in filled.items()}
