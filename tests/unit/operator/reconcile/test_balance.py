"""With autoBalance the operator takes the trainer's advice within the user's bounds, now and then, and says so."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import Ray, RayState
from tests.unit.operator.reconcile.worlds import World

MINUTE = 60


def pools(**critic: Any) -> list[dict[str, Any]]:
    """Return two pools; the critic's has bounds."""
    bounds = {"nodes": 2, "minNodes": 1, "maxNodes": 4}
    return [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1, **bounds, **critic}]


def advice(percent: int, *, actor: int = 1, critic: int = 2, gpus_per_node: int = 1) -> dict[str, Any]:
    """Return the trainer's advice for the nodes of both pools."""
    sizes: list[dict[str, Any]] = [
        {"name": "actor", "nodes": actor, "gpusPerNode": 2},
        {"name": "critic", "nodes": critic, "gpusPerNode": gpus_per_node},
    ]
    gpus = sum(size["nodes"] * size["gpusPerNode"] for size in sizes)
    return {"pools": sizes, "gpus": gpus, "stepTimePercent": percent}


def balanced(*given: dict[str, Any], enabled: bool = True, **critic: Any) -> World:
    """Return a job that runs with autoBalance and has this advice, nine minutes after it began."""
    auto = {"enabled": enabled, "intervalMinutes": 10}
    world = start(World(pools=pools(**critic), autoBalance=auto).settle())
    world.status |= {"layoutAdvice": list(given), "recommendation": "pool critic was 20% busy"}
    return report(world.wait(9 * MINUTE))


def start(world: World) -> World:
    """Bring all pods of the current cluster up and let the trainer begin."""
    world.pods_become(ready=True)
    name = world.cluster_name
    kind = type(world.observed.pods[0])
    more = [kind(f"{name}-critic-{number}", name, "critic", True) for number in range(2, 5)]
    nodes = {pool["name"]: pool["nodes"] for pool in world.status["effectiveLayout"]["pools"]}
    world.see(pods=(*world.observed.pods, *more[: nodes["critic"] - 1]))
    ray = world.observed.ray
    world.see(ray=ray or Ray()).settle()
    return report(world.wait(20))


def report(world: World) -> World:
    """Let the trainer report, and look."""
    world.trainer_reports(step=5)
    return world


def nodes_wanted(world: World) -> list[dict[str, Any]]:
    """Return what autoBalance has moved."""
    found: list[dict[str, Any]] = world.status.get("effectivePools", [])
    return found


def test_an_attempt_is_left_alone_until_it_has_run_for_the_interval() -> None:
    world = balanced(advice(2, critic=1)).settle()

    assert nodes_wanted(world) == []


def test_then_the_advice_is_another_layout_and_an_event_says_why() -> None:
    world = report(balanced(advice(2, critic=1)).wait(MINUTE)).settle()

    assert nodes_wanted(world) == [{"name": "critic", "nodes": 1, "specNodes": 2}]
    assert world.said[-2:] == [Reason.REBALANCED, Reason.REALLOCATING]
    assert "critic: nodes 2 -> 1): the step is predicted to take +2 % time" in world.words[-2]
    assert "pool critic was 20% busy" in world.words[-2]
    assert world.status["stop"]["reason"] == Reason.REALLOCATING
    assert world.spec["pools"][1]["nodes"] == 2, "the spec is never written"


def test_it_is_brought_into_force_like_any_other_layout() -> None:
    world = report(balanced(advice(2, critic=1)).wait(MINUTE)).settle().trainer_stops_gracefully().settle()

    assert [group["replicas"] for group in world.made[-1]["spec"]["workerGroupSpecs"]] == [1, 1]
    assert world.status["effectiveLayout"]["pools"][1]["nodes"] == 1
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("True", Reason.LAYOUT_APPLIED)
    assert world.status["retries"]["total"] == 0
    start(world)
    assert world.settle().status["phase"] == Phase.RUNNING
    assert world.status["attempt"] == 1


def test_it_is_moved_again_after_another_interval_and_back_to_nothing() -> None:
    world = report(balanced(advice(2, critic=1)).wait(MINUTE)).settle().trainer_stops_gracefully().settle()
    start(world)
    world.status["layoutAdvice"] = [advice(-10, critic=2)]

    report(world.wait(9 * MINUTE)).settle()
    assert world.status["attempt"] == 1
    assert "stop" not in world.status or world.status["stop"]["attempt"] == 0
    report(world.wait(2 * MINUTE)).settle()

    assert nodes_wanted(world) == []
    assert world.status["stop"]["attempt"] == 1


@pytest.mark.parametrize(
    ("given", "critic", "moved"),
    [
        ([advice(2, critic=1)], {}, 1),
        ([advice(2, critic=1), advice(-12, critic=3)], {}, 3),
        ([advice(-12, critic=3), advice(-20, critic=5)], {}, 3),
        ([advice(2, critic=1)], {"minNodes": 2}, None),
        ([advice(-12, critic=3)], {"maxNodes": 2}, None),
        ([advice(-12, actor=2, critic=1)], {}, None),
        ([advice(2, critic=1, gpus_per_node=2)], {}, None),
        ([advice(0, critic=2)], {}, None),
        ([], {}, None),
    ],
    ids=[
        "fewer GPUs",
        "time before GPUs",
        "the best within the bounds",
        "below the fewest",
        "above the most",
        "a pool without bounds",
        "other GPUs of a node",
        "as it is",
        "no advice",
    ],
)
def test_which_advice_is_taken(given: list[dict[str, Any]], critic: dict[str, Any], moved: int | None) -> None:
    world = report(balanced(*given, **critic).wait(MINUTE)).settle()

    assert [pool["nodes"] for pool in nodes_wanted(world)] == ([] if moved is None else [moved])
    assert ("stop" in world.status) == (moved is not None)


def test_advice_that_the_rules_refuse_is_not_taken() -> None:
    """Three GPUs cannot hold copies of the model on two each."""
    auto = {"enabled": True, "intervalMinutes": 10}
    copied = {"miniBatchSize": 8, "fsdpSize": 2}
    world = start(World(pools=pools(), autoBalance=auto, critic=copied).settle())
    world.status["layoutAdvice"] = [advice(-12, critic=3)]

    report(world.wait(11 * MINUTE)).settle()

    assert "stop" not in world.status


def test_nothing_is_moved_unless_it_is_asked_for() -> None:
    world = report(balanced(advice(2, critic=1), enabled=False).wait(MINUTE)).settle()

    assert nodes_wanted(world) == []
    assert world.status["phase"] == Phase.RUNNING


@pytest.mark.parametrize(
    "changes",
    [{"autoBalance": {"enabled": False}}, {"pools": pools(nodes=3)}],
    ids=["switched off", "the user says otherwise"],
)
def test_the_spec_counts_again(changes: dict[str, Any]) -> None:
    world = report(balanced(advice(2, critic=1)).wait(MINUTE)).settle().trainer_stops_gracefully().settle()
    start(world)

    world.edit(**changes).settle()

    assert nodes_wanted(world) == []
    assert world.status["stop"]["attempt"] == 1
    expected = changes.get("pools", pools())[1]["nodes"]
    assert f"pool critic: nodes 1 -> {expected}" in world.words[-1]


def test_other_bounds_restart_nothing() -> None:
    world = balanced().edit(pools=pools(maxNodes=9)).settle()

    assert "stop" not in world.status


def test_in_a_queue_nothing_is_moved() -> None:
    world = balanced(advice(-5, critic=3)).wait(2 * MINUTE)
    assert world.plan().events
    world.spec["runPolicy"] = {"queueName": "gpus"}
    report(world)

    assert Reason.REBALANCED not in [event.reason for event in world.plan().events]


def test_a_job_that_ends_is_not_moved() -> None:
    world = report(balanced(advice(2, critic=1)).wait(MINUTE)).ray_says(RayState.SUCCEEDED).settle()

    assert world.status["phase"] == Phase.SUCCEEDED
    assert nodes_wanted(world) == []
