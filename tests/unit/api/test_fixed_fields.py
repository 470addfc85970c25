"""Which edits of an accepted job's spec are refused; tests/integration/crd has the same table for the API server."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.fixed import IMMUTABLE, MUTABLE, fixed_changes, section_at
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from tests.good_spec import GOOD, Step, with_changes

REMEDY = "create another PPOJob with the new value"


def spec(*changes: tuple[str, Any]) -> PPOJobSpec:
    """Return the good spec with values at paths changed."""
    places: dict[tuple[Step, ...], Any] = {("spec", *path.split(".")): value for path, value in changes}
    return parse_spec(with_changes(places)["spec"])


@pytest.mark.parametrize(
    ("path", "value", "named", "shown"),
    [
        ("model.actor.path", "/data/another", "model", None),
        ("trainer.seed", 7, "trainer.seed", 7),
        ("checkpoint.path", "s3://bucket/job", "checkpoint.path", "s3://bucket/job"),
        ("device", "CPU", "device", "CPU"),
        ("actor.learningRate", 1.0e-3, "actor", None),
        ("runPolicy.queueName", "gpus", "runPolicy.queueName", "gpus"),
    ],
)
def test_a_fixed_field_is_named_with_value_and_remedy(path: str, value: Any, named: str, shown: Any) -> None:
    [(field, given, words)] = fixed_changes(spec(), spec((path, value)))

    assert (field, given) == (named, shown)
    assert REMEDY in words


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("runPolicy.suspend", True),
        ("trainer.totalSteps", 500),
        ("model.actor.compile", True),
        ("model.ref.offload", {"parameters": True}),
        ("rollout.speculative", {"numSpeculativeTokens": 2}),
        ("rollout.engineArgs", {"block_size": 32}),
        ("env", [{"name": "A", "value": "1"}]),
        ("schedule.mode", "Serial"),
    ],
)
def test_what_may_change_is_not_named(path: str, value: Any) -> None:
    assert list(fixed_changes(spec(), spec((path, value)))) == []


def test_a_job_stays_on_policy() -> None:
    apart = [
        ("pools", [{"name": name, "gpusPerNode": 2} for name in ("actor", "critic", "rollout")]),
        ("placement.rollout", ["rollout"]),
        ("algorithm.rolloutCorrection", {"method": "Truncate"}),
    ]

    [(field, value, words)] = fixed_changes(spec(*apart), spec(*apart, ("schedule.mode", "OneStepOff")))

    assert (field, value) == ("schedule.mode", "OneStepOff")
    assert REMEDY in words


def test_when_weights_are_updated_stays_as_it_is() -> None:
    off = [
        ("pools", [{"name": name, "gpusPerNode": 2} for name in ("actor", "critic", "rollout")]),
        ("placement.rollout", ["rollout"]),
        ("algorithm.rolloutCorrection", {"method": "Truncate"}),
        ("schedule.mode", "OneStepOff"),
    ]

    [(field, _, words)] = fixed_changes(spec(*off), spec(*off, ("schedule.weightUpdates", "InFlight")))

    assert field == "schedule.mode"
    assert "of its maxStaleness or weightUpdates" in words


def test_all_changes_are_named_at_once() -> None:
    found = fixed_changes(spec(), spec(("trainer.seed", 7), ("storage.claimName", "other")))

    assert {path for path, _, _ in found} == {"trainer.seed", "storage"}


def test_every_field_of_the_spec_is_either_fixed_or_may_change() -> None:
    def covered(path: str) -> bool:
        if path in (*MUTABLE, *IMMUTABLE):
            return True
        below = [name for name in (*MUTABLE, *IMMUTABLE) if name.startswith(f"{path}.")]
        fields = [f"{path}.{field.alias}" for field in section_at(path).model_fields.values()] if below else []
        return bool(fields) and all(map(covered, fields))

    assert [field.alias for field in PPOJobSpec.model_fields.values() if not covered(str(field.alias))] == []
    assert GOOD["spec"]
