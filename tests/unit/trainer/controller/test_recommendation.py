"""What the measured phases say about the sizes of the pools."""

from collections.abc import Mapping
from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.controller.layout import layout_of
from ppojob_trainer.controller.pool_sizes import fewer, more, moved
from ppojob_trainer.controller.recommendation import Recommendation, recommend

SPLIT = {"actor": "actor", "rollout": ["actor"], "critic": "critic", "ref": ["critic"], "reward": ["critic"]}
ONE_POOL = {"actor": "actor"}
# Generation and the actor's phases take nearly all of the step, and the critic's GPUs wait.
QUIET_CRITIC = {
    "gen": 4.0, "old_log_prob": 1.5, "values": 0.2, "ref": 0.2, "update_critic": 0.8, "update_actor": 3.0,
    "update_weights": 0.1,
}  # fmt: skip
# Both ways are as long.
EVEN = {"gen": 1.0, "old_log_prob": 2.0, "values": 1.0, "ref": 1.0, "update_critic": 4.0, "update_actor": 3.0}


def spec_of(pools: Mapping[str, tuple[int, int]], placement: Mapping[str, Any] = SPLIT, **sections: Any) -> PPOJobSpec:
    """pools: name -> nodes, GPUs of each."""
    raw: dict[str, Any] = {
        "image": "i",
        "model": {"actor": {"path": "/m"}},
        "data": {"train": {"reasoningGym": {"task": "products"}}, "trainBatchSize": 256},
        "reward": {"function": {"module": "r"}},
        "algorithm": {"kl": {"inReward": True}},
        "pools": [{"name": name, "nodes": nodes, "gpusPerNode": gpus} for name, (nodes, gpus) in pools.items()],
        "placement": dict(placement),
        "storage": {"claimName": "c"},
        "trainer": {"totalSteps": 5},
        **sections,
    }
    return resolve(parse_spec(raw))


def steps_of(phases: Mapping[str, float], number: int = 10, /, **metrics: float) -> list[dict[str, float]]:
    timings = {f"timing_s/{phase}": seconds for phase, seconds in phases.items()}
    busy = {"pool/actor/busy_fraction": 0.95, "pool/critic/busy_fraction": 0.13}
    return [{**timings, **busy, **metrics}] * number


def found(spec: PPOJobSpec, steps: list[dict[str, float]]) -> Recommendation:
    recommendation = recommend(steps, spec, layout_of(spec))
    assert recommendation is not None
    return recommendation


def layouts_of(recommendation: Recommendation) -> list[tuple[dict[str, tuple[int, int]], int, int]]:
    return [
        ({pool.name: (pool.nodes, pool.gpus_per_node) for pool in advice.pools}, advice.gpus, advice.step_time_percent)
        for advice in recommendation.layouts
    ]


def test_a_quiet_critic_gets_fewer_gpus_or_gives_one_to_the_actor() -> None:
    recommendation = found(spec_of({"actor": (1, 2), "critic": (1, 2)}), steps_of(QUIET_CRITIC))

    # The actor's way is the step: 4 + 1.5 + 3 + 0.1 s. On three GPUs half of the generation's time on one, and a tenth
    # of the others', stays: 3.556 + 1.091 + 2.182 + 0.1 s.
    assert recommendation.text == (
        "pool critic was 13% busy over the last 10 steps: 1 GPU instead of 2 would cost no step time; "
        "1 GPU more in pool actor would save 19% step time; "
        "1 GPU of pool critic in pool actor instead would save 19% step time; "
        "sharing pool critic with the rollout (placement.rollout) would save 8% step time (predicted)"
    )
    assert layouts_of(recommendation) == [
        ({"actor": (1, 2), "critic": (1, 1)}, 3, 0),
        ({"actor": (1, 3), "critic": (1, 2)}, 5, -19),
        ({"actor": (1, 3), "critic": (1, 1)}, 4, -19),
    ]


def test_where_both_ways_are_as_long_no_single_pool_is_worth_a_word() -> None:
    assert found(spec_of({"actor": (1, 8), "critic": (1, 8)}), steps_of(EVEN)) == Recommendation("", ())


def test_a_full_node_is_not_asked_for_more_gpus_but_for_another_node() -> None:
    recommendation = found(spec_of({"actor": (1, 8), "critic": (1, 1)}), steps_of(QUIET_CRITIC))

    assert [pools for pools, *_ in layouts_of(recommendation)] == [{"actor": (2, 8), "critic": (1, 1)}]


def test_a_pool_of_several_nodes_changes_by_nodes() -> None:
    recommendation = found(spec_of({"actor": (2, 4), "critic": (2, 4)}), steps_of(QUIET_CRITIC))

    assert [pools for pools, *_ in layouts_of(recommendation)] == [
        {"actor": (2, 4), "critic": (1, 4)},
        {"actor": (3, 4), "critic": (2, 4)},
        {"actor": (3, 4), "critic": (1, 4)},
    ]


def test_one_pool_is_recommended_only_more_gpus() -> None:
    recommendation = found(spec_of({"actor": (1, 2)}, ONE_POOL), steps_of(QUIET_CRITIC))

    assert layouts_of(recommendation) == [({"actor": (1, 3)}, 3, -20)]
    assert recommendation.text == "1 GPU more in pool actor would save 20% step time (predicted)"


VARIED = {"response_length/mean": 100.0, "response_length/max": 400.0}


def test_in_one_pool_a_slow_reward_function_is_recommended_to_score_while_others_are_generated() -> None:
    spec = spec_of({"actor": (1, 2)}, ONE_POOL)

    # A response is finished 3 s before the longest one. The log-probs leave 1.5 s of the reward, of a step of 11.3 s.
    recommendation = found(spec, steps_of(QUIET_CRITIC | {"reward": 3.4}, **VARIED))
    assert recommendation.text.endswith(
        "; scoring responses while others are generated (schedule: {mode: Overlapped, disabledOverlaps: "
        "[NextGeneration]}) would save 13% step time (predicted)"
    )

    # All three seconds, of a step of 17.8 s.
    slower = found(spec, steps_of(QUIET_CRITIC | {"reward": 9.9}, **VARIED))
    assert "would save 17% step time (predicted)" in slower.text


@pytest.mark.parametrize(
    ("reward", "lengths", "sections"),
    [
        (0.5, VARIED, {}),
        (3.9, {}, {}),
        (3.9, VARIED, {"schedule": {"mode": "Overlapped", "disabledOverlaps": ["NextGeneration"]}}),
        (3.9, VARIED, {"schedule": {"mode": "Serial"}}),
        (3.9, VARIED, {"reward": {"type": "Model"}, "model": {"actor": {"path": "/m"}, "reward": {"path": "/r"}}}),
    ],
    ids=["fast function", "equal lengths", "done already", "Serial", "a model"],
)
def test_other_rewards_are_not(reward: float, lengths: dict[str, float], sections: dict[str, Any]) -> None:
    spec = spec_of({"actor": (1, 2)}, ONE_POOL, **sections)

    assert "scoring responses" not in found(spec, steps_of(QUIET_CRITIC | {"reward": reward}, **lengths)).text


def test_on_cpu_pools_change_by_nodes_because_the_workers_of_one_share_its_cores() -> None:
    spec = spec_of({"actor": (1, 2), "critic": (2, 1)}, device="CPU")

    recommendation = found(spec, steps_of(QUIET_CRITIC))

    assert layouts_of(recommendation)[:2] == [
        ({"actor": (1, 2), "critic": (1, 1)}, 3, 0),
        ({"actor": (2, 2), "critic": (2, 1)}, 6, -29),
    ]
    assert "1 worker instead of 2" in recommendation.text


@pytest.mark.parametrize(
    ("sections", "sizes"),
    [
        ({}, {"fewer": [3, 2], "more": [5], "moved": [5, 6]}),
        # Two ranks work on the same rows: 3, 5 or 7 GPUs cannot be divided.
        ({"actor": {"tensorParallelSize": 2}}, {"fewer": [2], "more": [6], "moved": [6]}),
        ({"actor": {"sequenceParallelSize": 4}}, {"fewer": [], "more": [8], "moved": []}),
        ({"rollout": {"tensorParallelSize": 4}}, {"fewer": [], "more": [8], "moved": []}),
    ],
)
def test_only_sizes_that_the_rules_allow_are_offered(sections: dict[str, Any], sizes: dict[str, list[int]]) -> None:
    # The reference is divided as the actor is, so it goes there.
    spec = spec_of({"actor": (1, 4), "critic": (1, 4)}, {**SPLIT, "ref": ["actor"]}, **sections)

    offered = {"fewer": fewer(spec), "more": more(spec), "moved": moved(spec)}

    actors = {kind: sorted({pools[0].gpus for pools in found if pools[0].gpus != 4}) for kind, found in offered.items()}
    # A pool that gives, gives to the other: the critic may take from the actor too.
    assert {**actors, "moved": [gpus for gpus in actors["moved"] if gpus > 4]} == {
        kind: sorted(gpus) for kind, gpus in sizes.items()
    }


def test_gpus_that_could_not_hold_the_models_are_not_offered() -> None:
    spec = spec_of({"actor": (1, 2), "critic": (1, 2)})
    memory = {"pool/critic/memory_peak_gb": 50.0, "pool/critic/memory_total_gb": 80.0}

    fitting = found(spec, steps_of(QUIET_CRITIC, **memory, **{"perf/max_memory_allocated_gb/critic": 25.0}))
    too_large = found(spec, steps_of(QUIET_CRITIC, **memory, **{"perf/max_memory_allocated_gb/critic": 31.0}))

    # Of the critic's own 25 GB (31 GB) twice as much would be on the one GPU that is left.
    assert [gpus for _, gpus, _ in layouts_of(fitting)] == [3, 5, 4]
    assert [gpus for _, gpus, _ in layouts_of(too_large)] == [5]


SHARED = "sharing pool critic with the rollout (placement.rollout) would save 8% step time"


@pytest.mark.parametrize(
    ("sections", "peak_gb", "is_offered"),
    [
        ({}, 40.0, True),
        # An engine takes half of the 80 GB.
        ({}, 41.0, False),
        ({"device": "CPU"}, 0.0, False),
        # No node of the critic's pool can hold a replica.
        ({"rollout": {"tensorParallelSize": 4}}, 10.0, False),
    ],
)
def test_a_pool_is_shared_to_the_rollout_only_where_an_engine_has_room(
    sections: dict[str, Any], peak_gb: float, is_offered: bool
) -> None:
    memory = {"pool/critic/memory_peak_gb": peak_gb, "pool/critic/memory_total_gb": 80.0}
    actor = 4 if "rollout" in sections else 2
    spec = spec_of({"actor": (1, actor), "critic": (1, 2)}, {**SPLIT, "ref": ["actor"]}, **sections)

    assert (SHARED in found(spec, steps_of(QUIET_CRITIC, **memory)).text) == is_offered


@pytest.mark.parametrize(
    ("mean", "without", "is_offered"), [(512, [], True), (177, [], False), (177, ["Streaming"], True)]
)
def test_a_pool_is_not_shared_where_responses_stream_and_differ_in_length(
    mean: float, without: list[str], is_offered: bool
) -> None:
    spec = spec_of({"actor": (1, 2), "critic": (1, 2)}, schedule={"disabledOverlaps": without})
    lengths = {"response_length/mean": float(mean), "response_length/max": 512.0}
    # Long enough to be worth a word also where half of its time and more is the longest response's.
    phases = {**QUIET_CRITIC, "gen": 4 * QUIET_CRITIC["gen"]}

    assert ("sharing" in found(spec, steps_of(phases, **lengths)).text) is is_offered


def test_a_pool_that_is_shared_is_not_offered_again() -> None:
    spec = spec_of({"actor": (1, 2), "critic": (1, 2)}, {**SPLIT, "rollout": ["actor", "critic"]})

    assert "sharing" not in found(spec, steps_of(QUIET_CRITIC)).text


# The critic's pool has values and reference, and the actor's waits.
LONG_REFERENCE = {**EVEN, "values": 2.0, "ref": 4.0}
COPY = "a copy of the reference in pool actor (placement.ref) would save 11% step time"


@pytest.mark.parametrize(
    ("sections", "placement", "peak_gb", "is_offered"),
    [
        ({}, SPLIT, 60.0, True),
        # The reference allocates 10 GB on each of two GPUs, so 20 on one.
        ({}, SPLIT, 61.0, False),
        ({}, {**SPLIT, "ref": ["actor", "critic"]}, 10.0, False),
        (
            {"model": {"actor": {"path": "/m", "lora": {"rank": 8}}}},
            {"actor": "actor", "critic": "critic"},
            10.0,
            False,
        ),
    ],
)
def test_a_copy_of_the_reference_is_offered_where_it_has_room(
    sections: dict[str, Any], placement: dict[str, Any], peak_gb: float, is_offered: bool
) -> None:
    memory = {"pool/actor/memory_peak_gb": peak_gb, "pool/actor/memory_total_gb": 80.0}
    memory |= {"perf/max_memory_allocated_gb/ref": 10.0}
    spec = spec_of({"actor": (1, 1), "critic": (1, 2)}, placement, **sections)

    text = found(spec, steps_of(LONG_REFERENCE, **memory)).text

    assert ("a copy of the reference" in text) is is_offered
    assert (COPY in text) is is_offered


@pytest.mark.parametrize(
    ("reward", "pools", "is_offered"),
    [("Model", ["critic"], True), ("Model", ["actor", "critic"], False), ("Function", ["critic"], False)],
)
def test_a_copy_of_the_reward_model_is_offered(reward: str, pools: list[str], is_offered: bool) -> None:
    model: dict[str, Any] = {"actor": {"path": "/m"}, "reward": {"path": "/rm"}}
    sections: dict[str, Any] = {"reward": {"type": "Model"}, "model": model} if reward == "Model" else {}
    spec = spec_of({"actor": (1, 1), "critic": (1, 2)}, {**SPLIT, "reward": pools}, **sections)
    long_reward = {**EVEN, "values": 2.0, "ref": 1.0, "reward_model": 4.0}

    text = found(spec, steps_of(long_reward)).text

    assert ("a copy of the reward model in pool actor (placement.reward) would save" in text) is is_offered


@pytest.mark.parametrize(("number", "is_known"), [(0, False), (2, False), (3, True), (40, True)])
def test_it_waits_for_some_steps(number: int, is_known: bool) -> None:
    spec = spec_of({"actor": (1, 2), "critic": (1, 2)})

    assert (recommend(steps_of(QUIET_CRITIC, number), spec, layout_of(spec)) is not None) == is_known


def test_steps_that_update_the_critic_alone_do_not_count() -> None:
    spec = spec_of({"actor": (1, 2), "critic": (1, 2)})
    warm_up = [{name: s for name, s in step.items() if name != "timing_s/update_actor"} for step in steps_of(EVEN)]

    assert recommend(warm_up, spec, layout_of(spec)) is None
