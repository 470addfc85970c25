"""Every bad spec is refused with the field's path, its value and what would be right; good ones pass."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.spelling import REMEDY_OF
from ppojob_api.v1alpha1.validation import SpecError, parse_manifest
from tests.bad_specs import BAD_SPECS, GOOD, BadSpec, with_changes
from tests.examples import EXAMPLES, name_of, spec_of


@pytest.mark.parametrize("bad", BAD_SPECS, ids=lambda bad: bad.name)
def test_a_bad_spec_is_refused_with_path_value_and_remedy(bad: BadSpec) -> None:
    with pytest.raises(SpecError) as caught:
        parse_manifest(bad.manifest())

    named = {error.path: str(error) for error in caught.value.errors}
    assert bad.path in named, f"named instead: {named}"
    assert bad.says in named[bad.path]
    assert bad.shows in named[bad.path]


def test_every_mistake_of_the_table_has_its_own_name() -> None:
    names = [bad.name for bad in BAD_SPECS]

    assert len(set(names)) == len(names)


def test_the_spec_that_the_table_begins_from_is_good() -> None:
    namespace, name, spec = parse_manifest(GOOD)

    assert (namespace, name) == ("default", "good")
    assert spec.pool("critic").gpus == 1


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_every_example_is_good(path: Path) -> None:
    spec_of(path)


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_all_problems_are_reported_at_once() -> None:
    bad = with_changes(
        {("spec", "pools", 0, "gpusPerNode"): 0, ("spec", "actor", "gradClip"): -1, ("spec", "device"): "x"}
    )

    with pytest.raises(SpecError) as caught:
        parse_manifest(bad)

    assert {error.path for error in caught.value.errors} == {
        "spec.pools[0].gpusPerNode",
        "spec.actor.gradClip",
        "spec.device",
    }


def test_all_problems_that_span_fields_are_reported_at_once() -> None:
    bad = with_changes({("spec", "actor", "miniBatchSize"): 3, ("spec", "placement", "ref"): ["nowhere"]})

    with pytest.raises(SpecError) as caught:
        parse_manifest(bad)

    assert [error.path for error in caught.value.errors] == ["spec.placement.ref[0]", "spec.actor.miniBatchSize"]


def test_a_long_value_is_shortened() -> None:
    bad = with_changes({("spec", "device"): "x" * 1000})

    with pytest.raises(SpecError) as caught:
        parse_manifest(bad)

    assert len(str(caught.value)) < 400


def test_a_status_in_the_file_is_passed_over() -> None:
    parse_manifest(with_changes({("status",): {"phase": "Running"}}))


def test_a_label_may_name_the_queue_of_a_manifest() -> None:
    labels = {("metadata", "labels"): {"kueue.x-k8s.io/queue-name": "gpus"}}
    _, _, spec = parse_manifest(with_changes(labels | {("spec", "runPolicy", "queuePriorityClass"): "high"}))

    assert spec.run_policy.queue_name == "gpus"
    with pytest.raises(SpecError, match=r"queue-name\]: 'gpus': spec.runPolicy.queueName is 'cpus': remove one"):
        parse_manifest(with_changes(labels | {("spec", "runPolicy", "queueName"): "cpus"}))


def test_every_pattern_has_words() -> None:
    patterns = set(patterns_in(PPOJobSpec.model_json_schema(by_alias=True)))

    assert len(patterns) > 10
    assert patterns - REMEDY_OF.keys() == set()


def patterns_in(schema: object) -> Iterator[str]:
    """Yield the patterns of all fields of a JSON schema."""
    if isinstance(schema, dict):
        pattern = schema.get("pattern")
        yield from [pattern] if isinstance(pattern, str) else []
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from patterns_in(part)


@pytest.mark.parametrize(
    ("section", "name", "meant"),
    [
        (("data",), "maxResponseLenght", "did you mean maxResponseLength?"),
        (("rollout",), "gpu_memory_utilization", "did you mean gpuMemoryUtilization?"),
        (("pools", 0), "gpuPerNode", "did you mean gpusPerNode?"),
        (("rollout",), "maxResponseLength", "did you mean spec.data.maxResponseLength?"),
        (("data", "train"), "trainBatchSize", "did you mean spec.data.trainBatchSize?"),
        (("actor",), "gradientCheckpointing", "did you mean spec.model.actor.gradientCheckpointing?"),
        (("trainer",), "stepz", "correct its name or remove it"),
        # More than three sections have it.
        (("trainer",), "path", "correct its name or remove it"),
    ],
)
def test_a_field_that_may_be_meant_is_named(section: tuple[str | int, ...], name: str, meant: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_manifest(with_changes({("spec", *section, name): 1}))

    (message,) = [error.message for error in caught.value.errors if error.path.endswith(f".{name}")]
    assert message.startswith("there is no such field: ")
    assert message.endswith(meant)


@pytest.mark.parametrize(
    ("section", "name", "value", "remedy"),
    [
        ("runPolicy", "activeDeadlineSeconds", "4h", "without quotes and without a unit"),
        ("trainer", "totalSteps", 1.5, "write a whole number"),
        ("actor", "learningRate", "small", "write a number"),
        ("data", "shuffle", "yes", "write true or false, without quotes"),
        ("reward", "type", 1, "'Function', 'Model' or 'Both'"),
        ("storage", "claimName", 1, "write it in quotes"),
        ("placement", "rollout", "actor", "write it as a list, [a, b]"),
        ("algorithm", "kl", None, "must be a section with fields: add them, or remove it"),
        ("algorithm", "kl", True, "must be a section with fields: add them, or remove it"),
        ("reward", "function", {"module": "a", "kwargs": 1}, "must be a section with fields: add them, or remove it"),
    ],
)
def test_a_value_of_another_type_is_refused_with_how_to_write_it(
    section: str, name: str, value: object, remedy: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_manifest(with_changes({("spec", section, name): value}))

    assert any(remedy in error.message and error.path.startswith(f"spec.{section}") for error in caught.value.errors), (
        str(caught.value)
    )
    assert "instance of" not in str(caught.value), "a name of our classes"
