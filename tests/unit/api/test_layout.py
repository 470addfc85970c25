"""The layout is the part of a spec that may change while a job runs, and its changes are told in words."""

import copy
from typing import Any

import pytest

from ppojob_api.v1alpha1.layout import Layout, differences, layout_of, with_layout
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.validation import parse_spec
from tests.bad_specs import GOOD

RAW: dict[str, Any] = GOOD["spec"]


def layout(**changes: Any) -> Layout:
    """Return the layout of the good spec with sections replaced."""
    return layout_of(resolve(parse_spec({**RAW, **changes})))


def pools(*, critic: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the good spec's pools with fields of the critic's changed."""
    changed = copy.deepcopy(RAW["pools"])
    changed[1] |= critic or {}
    return changed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"pools": pools(critic={"nodes": 2})}, ["pool critic: nodes 1 -> 2"]),
        (
            {"pools": pools(critic={"nodes": 2, "gpusPerNode": 4})},
            ["pool critic: nodes 1 -> 2", "pool critic: gpusPerNode 1 -> 4"],
        ),
        ({"pools": pools(critic={"nodeSelector": {"a": "b"}})}, ["pool critic: nodeSelector is another"]),
        (
            {"pools": [*pools(), {"name": "judge", "nodes": 2, "gpusPerNode": 4}], "placement": {"actor": "actor"}},
            [
                "pool judge is added with 2 x 4 GPUs",
                "placement.critic critic -> actor",
                "placement.reward critic -> actor",
                "schedule.mode Overlapped -> Serial",
            ],
        ),
        (
            {"pools": RAW["pools"][:1], "placement": {"actor": "actor"}},
            [
                "pool critic is taken away",
                "placement.critic critic -> actor",
                "placement.reward critic -> actor",
                "schedule.mode Overlapped -> Serial",
            ],
        ),
        ({"actor": {"miniBatchSize": 8, "tensorParallelSize": 2}}, ["actor.tensorParallelSize 1 -> 2"]),
        ({"rollout": {"tensorParallelSize": 2}}, ["rollout.tensorParallelSize 1 -> 2"]),
        ({"schedule": {"without": ["Values"]}}, ["schedule.without is another"]),
        ({"placement": {"actor": "actor", "critic": "critic", "reward": "critic"}}, []),
        ({"placement": {"actor": "actor", "critic": "critic", "lentToRollout": []}}, []),
        (
            {"placement": {"actor": "actor", "critic": "critic", "lentToRollout": ["critic"]}},
            ["placement.lentToRollout is another"],
        ),
        ({"trainer": {"totalSteps": 7}}, []),
    ],
)
def test_what_is_another_is_said_field_by_field(changes: dict[str, Any], words: list[str]) -> None:
    assert differences(layout(), layout(**changes)) == words


def test_a_spec_with_another_layout_differs_in_nothing_else() -> None:
    small = {
        **RAW,
        "pools": RAW["pools"][:1],
        "placement": {"actor": "actor"},
        "actor": {"miniBatchSize": 8, "learningRate": 0.5, "sequenceParallelSize": 2},
        "trainer": {"totalSteps": 7},
    }

    relaid = resolve(parse_spec(with_layout(small, layout())))

    assert layout_of(relaid) == layout()
    assert relaid.actor.learning_rate == 0.5
    assert relaid.trainer.total_steps == 7


def test_a_layout_survives_the_way_through_the_status() -> None:
    changed = layout(pools=pools(critic={"podTemplate": {"spec": {"priorityClassName": "x"}}}))

    assert Layout.model_validate(changed.to_wire()) == changed
