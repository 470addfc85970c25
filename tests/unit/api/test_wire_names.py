"""Names on the wire: camelCase with Kubernetes' initialisms, and the same names in both directions."""

from typing import Any

import pytest
from pydantic import BaseModel

from ppojob_api.v1alpha1.base import wire_name
from ppojob_api.v1alpha1.schema import structural
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_api.v1alpha1.validation import parse_manifest
from tests.bad_specs import GOOD


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("image", "image"),
        ("train_batch_size", "trainBatchSize"),
        ("max_tokens_per_gpu", "maxTokensPerGPU"),
        ("gpus_per_node", "gpusPerNode"),
        ("gpu_memory_utilization", "gpuMemoryUtilization"),
        ("ttl_seconds_after_finished", "ttlSecondsAfterFinished"),
        ("cpu_cache_gib", "cpuCacheGib"),
    ],
)
def test_a_field_has_its_name_on_the_wire(field: str, expected: str) -> None:
    assert wire_name(field) == expected


@pytest.mark.parametrize("model", [PPOJobSpec, PPOJobStatus])
def test_no_name_on_the_wire_has_an_underscore(model: type[BaseModel]) -> None:
    assert [name for name in _names(structural(model)) if "_" in name] == []


def test_a_spec_survives_the_wire() -> None:
    spec = parse_manifest(GOOD)[2]

    assert PPOJobSpec.model_validate(spec.to_wire()) == spec


def test_absent_fields_are_left_out_of_the_wire() -> None:
    wire = parse_manifest(GOOD)[2].to_wire()

    assert "validation" not in wire["data"]
    assert "path" not in wire["model"]["critic"]


def _names(schema: dict[str, Any]) -> list[str]:
    fields = schema.get("properties", {})
    inner = [*fields.values(), *([schema["items"]] if "items" in schema else [])]
    return [*fields, *(name for field in inner for name in _names(field))]
