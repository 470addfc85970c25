"""The layout is the part of a spec that may change while a job runs, and its changes are described field by field."""

import copy
from typing import Any

import pytest

from ppojob_api.v1alpha1.fixed import section_at
from ppojob_api.v1alpha1.layout import SETTINGS, Layout, differences, layout_of, with_elastic_bounds, with_layout
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
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
        ({"pools": pools(critic={"nodeSelector": {"a": "b"}})}, ["pool critic: nodeSelector changes"]),
        (
            {"pools": [*pools(), {"name": "judge", "nodes": 2, "gpusPerNode": 4}], "placement": {"actor": "actor"}},
            [
                "pool judge is added with 2 x 4 GPUs",
                "placement.critic critic -> actor",
                "placement.reward [critic] -> [actor]",
                "schedule.disabledOverlaps [] -> [NextGeneration, Streaming]",
            ],
        ),
        (
            {"pools": RAW["pools"][:1], "placement": {"actor": "actor"}},
            [
                "pool critic is removed",
                "placement.critic critic -> actor",
                "placement.reward [critic] -> [actor]",
                "schedule.disabledOverlaps [] -> [NextGeneration, Streaming]",
            ],
        ),
        ({"actor": {"miniBatchSize": 8, "tensorParallelSize": 2}}, ["actor.tensorParallelSize 1 -> 2"]),
        ({"rollout": {"tensorParallelSize": 2}}, ["rollout.tensorParallelSize 1 -> 2"]),
        ({"rollout": {"pipelineParallelSize": 2}}, ["rollout.pipelineParallelSize default -> 2"]),
        ({"schedule": {"disabledOverlaps": ["Values"]}}, ["schedule.disabledOverlaps [] -> [Values]"]),
        ({"placement": {"actor": "actor", "critic": "critic", "reward": ["critic"]}}, []),
        ({"placement": {"actor": "actor", "critic": "critic", "rollout": ["actor"]}}, []),
        (
            {"placement": {"actor": "actor", "critic": "critic", "rollout": ["actor", "critic"]}},
            ["placement.rollout [actor] -> [actor, critic]"],
        ),
        ({"trainer": {"totalSteps": 7}}, []),
        ({"image": "registry.example/trainer:2"}, [f"image {RAW['image']} -> registry.example/trainer:2"]),
        ({"actor": {"miniBatchSize": 8, "maxTokensPerGPU": 4096}}, ["actor.maxTokensPerGPU default -> 4096"]),
        (
            {"model": {**RAW["model"], "critic": {"compile": True, "offload": {"optimizer": True}}}},
            ["model.critic.compile default -> True", "model.critic.offload changes"],
        ),
        ({"env": [{"name": "PASSWORD", "value": "not to be shown"}]}, ["env changes"]),
    ],
)
def test_each_changed_field_is_named(changes: dict[str, Any], words: list[str]) -> None:
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


def test_settings_return_to_their_defaults_and_to_what_they_were() -> None:
    plain = resolve(parse_spec(RAW))
    tuned_raw = {
        **RAW,
        "rollout": {"temperature": 0.5, "sleep": False},
        "model": {**RAW["model"], "critic": {"compile": True}},
    }
    tuned = resolve(parse_spec(tuned_raw))

    back = resolve(parse_spec(with_layout(tuned_raw, layout_of(plain))))
    assert (back.rollout.sleep, back.rollout.temperature, back.model.critic.compile) == (True, 0.5, False)
    there = resolve(parse_spec(with_layout(RAW, layout_of(tuned))))
    assert (there.rollout.sleep, there.rollout.temperature, there.model.critic.compile) == (False, 1.0, True)


def test_a_layout_of_an_earlier_version_keeps_the_settings_of_the_spec() -> None:
    raw = {**RAW, "rollout": {"sleep": False}}
    earlier = layout().model_copy(update={"settings": None})

    relaid = resolve(parse_spec(with_layout(raw, earlier)))

    assert relaid.rollout.sleep is False
    assert differences(earlier, layout_of(relaid)) == []


def test_every_setting_is_a_field_of_the_spec() -> None:
    for path in SETTINGS:
        section, _, name = path.rpartition(".")
        fields = section_at(section).model_fields.values() if section else PPOJobSpec.model_fields.values()
        assert name in {field.alias for field in fields}, path


def test_a_layout_survives_the_way_through_the_status() -> None:
    changed = layout(pools=pools(critic={"podTemplate": {"spec": {"priorityClassName": "x"}}}))

    assert Layout.model_validate(changed.to_wire()) == changed


def _elastic(min_nodes: int, max_nodes: int) -> dict[str, Any]:
    bounds = {"minNodes": min_nodes, "maxNodes": max_nodes}
    spot = {"name": "spot", "gpusPerNode": 1, "elastic": bounds}
    placement = {"actor": "actor", "critic": "critic", "rollout": ["actor", "spot"]}
    return {**RAW, "pools": [*pools(), spot], "placement": placement}


def test_the_bounds_of_an_elastic_pool_apply_to_the_layout_in_force() -> None:
    old, new = (resolve(parse_spec(_elastic(*bounds))) for bounds in ((1, 4), (2, 6)))
    assert differences(layout_of(old), layout_of(new)) == ["pool spot: nodes 4 -> 6", "pool spot: elastic changes"]

    relaid = with_layout(_elastic(2, 6), layout_of(old))
    assert resolve(parse_spec(relaid)).pool("spot").nodes == 4
    bounded = resolve(parse_spec(with_elastic_bounds(relaid, _elastic(2, 6))))

    assert bounded.pool("spot") == new.pool("spot")
    assert differences(layout_of(bounded), layout_of(new)) == []


def test_only_pools_that_are_elastic_in_both_get_other_bounds() -> None:
    fixed = {**RAW, "pools": [*pools(), {"name": "spot", "nodes": 3, "gpusPerNode": 1}]}
    fixed["placement"] = _elastic(1, 4)["placement"]
    one, other = (resolve(parse_spec(raw)) for raw in (_elastic(1, 4), fixed))

    assert with_elastic_bounds(one.to_wire(), fixed)["pools"] == one.to_wire()["pools"]
    assert with_elastic_bounds(other.to_wire(), _elastic(1, 4))["pools"] == other.to_wire()["pools"]
