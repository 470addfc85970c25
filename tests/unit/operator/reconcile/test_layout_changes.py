"""A running job gets another layout by a graceful stop and an attempt that is not a retry, or says why it does not."""

from collections.abc import Callable
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import JOB_FILE, Condition, Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_operator.plan import Ray, RayState
from tests.unit.operator.reconcile.worlds import UID, World, first_cluster

ACTOR, CRITIC = {"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}
TWO_CRITICS: dict[str, Any] = {"pools": [ACTOR, {**CRITIC, "nodes": 2}]}
ONE_POOL: dict[str, Any] = {"pools": [ACTOR], "placement": {"actor": "actor"}}
TWO_SLICES: dict[str, Any] = {"actor": {"miniBatchSize": 8, "sequenceParallelSize": 2}}
ILLEGAL: dict[str, Any] = {"pools": [{**ACTOR, "podTemplate": {"spec": {"restartPolicy": "Always"}}}, CRITIC]}
HIGH_PRIORITY: dict[str, Any] = {"pools": [ACTOR, {**CRITIC, "podTemplate": {"spec": {"priorityClassName": "high"}}}]}
NO_RETRIES = (0, 0, 0)


def relaid(changes: dict[str, Any]) -> World:
    """Return a job that ran, whose layout was changed, and whose trainer has stopped gracefully."""
    return World().run().edit(**changes).settle().trainer_stops_gracefully().settle()


def test_the_trainer_is_asked_to_stop_and_an_event_says_what_changes() -> None:
    world = World().run().edit(**TWO_CRITICS)

    plan = world.look()

    assert plan.delete_clusters == ()
    assert world.status["stop"]["reason"] == Reason.REALLOCATING
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.REALLOCATING)
    assert world.said[-1] == Reason.REALLOCATING
    assert "for another layout (pool critic: nodes 1 -> 2)" in world.words[-1]
    assert world.status["phase"] == Phase.RESTARTING


def test_until_it_has_stopped_the_job_is_judged_by_the_layout_in_force() -> None:
    world = World().run().edit(**TWO_CRITICS).settle()

    world.wait(300).trainer_reports().settle()

    assert world.verdict(Condition.POOLS_READY) == ("True", Reason.PODS_READY)
    assert world.status["ready"] == "3/3"
    assert world.status["attempt"] == 0
    assert [pool["desiredNodes"] for pool in world.status["pools"]] == [1, 1]
    assert world.status["effectiveLayout"]["pools"][1]["nodes"] == 1


def test_then_it_continues_with_the_new_layout_as_the_next_attempt() -> None:
    world = relaid(TWO_CRITICS)

    groups = world.made[-1]["spec"]["workerGroupSpecs"]
    assert [(group["groupName"], group["replicas"]) for group in groups] == [("actor", 1), ("critic", 2)]
    assert [cluster.name for cluster in world.observed.clusters] == [world.cluster_name]
    assert world.cluster_name != first_cluster()
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("True", Reason.LAYOUT_APPLIED)
    assert world.status["ready"] == "0/4"
    assert world.status["effectiveLayout"]["pools"][1]["nodes"] == 2
    text = (world.observed.config or {})[JOB_FILE]
    assert JobFile.model_validate_json(text).spec.pools[1].nodes == 2


def test_a_layout_whose_raycluster_the_api_server_refuses_is_not_in_force() -> None:
    world = relaid(TWO_CRITICS).see(clusters=(), last_error="nodeSelector.gpu: expected string")

    world.look()

    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.CLUSTER_REFUSED)
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.CLUSTER_REFUSED)
    assert "PoolsReady" in world.condition(Condition.LAYOUT_APPLIED).message
    assert world.said.count(Reason.CLUSTER_REFUSED) == 1
    world.see(last_error="").settle()
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("True", Reason.LAYOUT_APPLIED)


def test_it_is_no_retry_and_waits_for_nothing() -> None:
    world = relaid(TWO_CRITICS)

    world.pods_become(ready=True)
    name = world.cluster_name
    second = next(pod for pod in world.observed.pods if pod.pool == "critic")
    world.see(pods=(*world.observed.pods, type(second)(f"{name}-critic-2", name, "critic", True)), ray=Ray()).settle()

    assert world.status["submissionId"] == f"ppojob-{UID}-1"
    assert world.totals == NO_RETRIES
    assert "lastFailure" not in world.status
    assert world.said[3:] == [
        Reason.REALLOCATING,
        Reason.TRAINER_STOPPED,
        Reason.LAYOUT_APPLIED,
        Reason.PODS_READY,
        Reason.TRAINER_SUBMITTED,
    ]


def test_a_job_that_ran_for_long_has_the_whole_startup_deadline_for_its_new_pods() -> None:
    world = World().run()
    world.wait(100_000).trainer_reports().edit(**TWO_CRITICS).settle().trainer_stops_gracefully().settle()

    world.wait(1799).settle()
    assert world.verdict(Condition.PROGRESSING) == ("False", Reason.RESTARTING)
    world.wait(1).settle()

    assert world.verdict(Condition.PROGRESSING) == ("False", Reason.STARTUP_DELAYED)
    assert world.status["phase"] == Phase.RESTARTING


@pytest.mark.parametrize(
    ("changes", "keeps_pods"),
    [
        (TWO_CRITICS, False),
        (ONE_POOL, False),
        ({"pools": [ACTOR, {**CRITIC, "gpusPerNode": 2}]}, False),
        ({"pools": [ACTOR, CRITIC, {"name": "third", "gpusPerNode": 1}]}, False),
        ({"pools": [{**ACTOR, "nodeSelector": {"gpu-type": "h200"}}, CRITIC]}, False),
        (TWO_SLICES, True),
        ({"schedule": {"mode": "Serial"}}, True),
        ({"placement": {"actor": "actor", "critic": "critic", "reward": ["actor"]}}, True),
        ({"placement": {"actor": "actor", "critic": "critic", "rollout": ["critic"]}}, True),
        ({"image": "trainer:2"}, False),
        ({"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}, False),
        ({"head": {"resources": {"memory": "16Gi"}}}, False),
        ({"critic": {"miniBatchSize": 8, "maxTokensPerGPU": 4096}}, True),
        ({"rollout": {"gpuMemoryUtilization": 0.3}}, True),
        ({"model": {"actor": {"path": "/data/model", "offload": {"optimizer": True}}}}, True),
        ({"checkpoint": {"async": False}}, True),
    ],
    ids=[
        "more nodes",
        "a pool less",
        "more GPUs",
        "a pool more",
        "other nodes",
        "slices",
        "schedule",
        "reward elsewhere",
        "rollout elsewhere",
        "image",
        "environment",
        "memory of the head",
        "tokens",
        "memory of the engine",
        "offload",
        "checkpoints that training waits for",
    ],
)
def test_the_pods_are_replaced_only_where_others_are_needed(changes: dict[str, Any], keeps_pods: bool) -> None:
    world = relaid(changes)

    assert (world.cluster_name == first_cluster()) == keeps_pods
    assert world.status["attempt"] == 1
    assert (world.status.get("submissionId") == f"ppojob-{UID}-1") == keeps_pods
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("True", Reason.LAYOUT_APPLIED)


def test_a_mistyped_image_is_corrected_before_the_job_has_begun() -> None:
    world = World(image="trainer:mistyped").settle()
    first = world.cluster_name

    world.edit(image="trainer:1").settle()

    assert world.cluster_name != first
    assert world.made[-1]["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] == "trainer:1"
    assert world.totals == NO_RETRIES


def test_the_attempt_on_the_same_pods_reads_the_new_sizes() -> None:
    world = relaid(TWO_SLICES)

    text = (world.observed.config or {})[JOB_FILE]
    assert JobFile.model_validate_json(text).spec.actor.sequence_parallel_size == 2
    assert world.status["effectiveLayout"]["actor"]["sequenceParallelSize"] == 2


def pending() -> World:
    return World().settle()


def backing_off_on_warm_pods() -> World:
    return World().run().trainer_fails(Reason.TRAINER_FAILED, FailureKind.USER).settle()


def backing_off_without_pods() -> World:
    return World().run().trainer_fails(Reason.WORKER_LOST, FailureKind.INFRASTRUCTURE).settle()


def suspended() -> World:
    return World().run().suspend().settle().trainer_stops_gracefully().settle()


@pytest.mark.parametrize("state", [pending, backing_off_on_warm_pods, backing_off_without_pods, suspended])
def test_an_attempt_that_has_not_begun_needs_no_stop(state: Callable[[], World]) -> None:
    world = state()
    retries = world.status["retries"]

    world.edit(**TWO_CRITICS).settle()
    world.suspend(False).wait(10).settle()

    groups = world.made[-1]["spec"]["workerGroupSpecs"]
    assert [group["replicas"] for group in groups] == [1, 2]
    assert [cluster.name for cluster in world.observed.clusters] == [world.cluster_name]
    assert world.made[-1]["metadata"]["name"] == world.cluster_name
    assert world.status["retries"] == retries
    assert world.status.get("stop", {}).get("attempt") != world.status["attempt"]
    assert len({cluster["metadata"]["name"] for cluster in world.made}) == len(world.made)


def test_another_layout_of_a_pending_job_is_reported_and_its_deadline_restarts() -> None:
    world = World(runPolicy={"startupDeadlineSeconds": 60}).settle().wait(50).edit(**TWO_CRITICS).settle()

    assert world.said[1:] == [Reason.REALLOCATING, Reason.LAYOUT_APPLIED]
    assert "pool critic: nodes 1 -> 2" in world.words[1]
    assert world.wait(59).settle().status["phase"] == Phase.RESTARTING


def test_an_edit_that_is_taken_back_before_it_was_seen_is_none() -> None:
    world = World().run().edit(**TWO_CRITICS).edit(pools=[ACTOR, CRITIC])

    world.settle()

    assert world.status["phase"] == Phase.RUNNING
    assert "stop" not in world.status


def test_an_edit_that_is_taken_back_too_late_is_a_restart_on_the_same_pods() -> None:
    world = World().run().edit(**TWO_CRITICS).settle().edit(pools=[ACTOR, CRITIC]).settle()
    assert world.status["phase"] == Phase.RESTARTING

    world.trainer_stops_gracefully().settle()

    assert world.cluster_name == first_cluster()
    assert world.status["attempt"] == 1
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("True", Reason.LAYOUT_APPLIED)


def test_a_trainer_that_does_not_stop_in_time_loses_its_pods_whatever_changed() -> None:
    world = World(runPolicy={"stopGracePeriodSeconds": 30}).run().edit(**TWO_SLICES).settle()

    world.wait(30).trainer_reports().settle()

    assert Reason.GRACE_PERIOD_EXCEEDED in world.said
    assert world.cluster_name != first_cluster()
    assert world.totals == NO_RETRIES


def test_a_suspension_and_another_layout_are_one_stop() -> None:
    world = World().run().edit(**TWO_CRITICS, runPolicy={"suspend": True}).settle().trainer_stops_gracefully().settle()
    assert world.status["phase"] == Phase.SUSPENDED

    world.suspend(False).settle()

    assert world.status["attempt"] == 1
    assert [group["replicas"] for group in world.made[-1]["spec"]["workerGroupSpecs"]] == [1, 2]


def test_a_job_that_ends_before_it_was_stopped_has_ended() -> None:
    world = World().run().edit(**TWO_CRITICS).settle()

    world.ray_says(RayState.SUCCEEDED).settle()

    assert world.status["phase"] == Phase.SUCCEEDED
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.TRAINER_SUCCEEDED)


def test_a_layout_that_cannot_be_run_leaves_the_job_alone_and_says_so() -> None:
    world = World().run().edit(**ILLEGAL).settle()

    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)
    message = world.condition(Condition.LAYOUT_APPLIED).message
    assert "spec.pools[0].podTemplate.spec.restartPolicy: 'Always'" in message
    assert world.verdict(Condition.ACCEPTED)[0] == "True"
    assert Reason.INVALID_SPEC in world.said
    for _ in range(30):
        world.wait(10).trainer_reports().settle()
    assert world.status["phase"] == Phase.RUNNING
    assert "stop" not in world.status

    world.ray_says(RayState.SUCCEEDED).settle()
    assert world.status["phase"] == Phase.SUCCEEDED


def test_a_layout_that_the_api_server_refuses_leaves_the_job_alone() -> None:
    world = World().run()
    world.refusal = "500 failed to create typed patch object: .nodeSelector.gpu: expected string, got true"

    world.edit(pools=[ACTOR, {**CRITIC, "podTemplate": {"spec": {"nodeSelector": {"gpu": True}}}}]).settle()

    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)
    assert "expected string, got true" in world.condition(Condition.LAYOUT_APPLIED).message
    for _ in range(3):
        world.wait(10).trainer_reports().settle()
    assert world.status["phase"] == Phase.RUNNING
    assert "stop" not in world.status

    world.refusal = ""
    world.edit(**TWO_CRITICS).settle()
    assert world.status["stop"]["reason"] == Reason.REALLOCATING


def test_a_refusal_names_the_users_item_by_its_place_in_the_users_template() -> None:
    world = World().run()
    world.refusal = "spec.pools[1].podTemplate.spec.containers[1].image: Required value"

    template = {"spec": {"containers": [{"name": "sidecar"}]}}
    world.edit(pools=[ACTOR, {**CRITIC, "podTemplate": template}]).settle()

    message = world.condition(Condition.LAYOUT_APPLIED).message
    assert message.endswith("spec.pools[1].podTemplate.spec.containers[0].image: Required value")


def test_after_such_a_refusal_a_retry_has_the_layout_before_and_the_next_trainer_tries_again() -> None:
    world = World().run()
    world.refusal = "no PriorityClass with name high was found"
    world.edit(**HIGH_PRIORITY).settle()

    world.pod_is_gone("head").settle().wait(10).settle()
    assert world.status["attempt"] == 1
    assert all("priorityClassName" not in group["template"]["spec"] for group in groups_of(world.made[-1]))
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)
    message = world.condition(Condition.LAYOUT_APPLIED).message
    assert message.count("the job continues with the layout") == 1

    world.run()
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)
    world.refusal = ""
    world.settle().trainer_stops_gracefully().settle()
    assert groups_of(world.made[-1])[1]["template"]["spec"]["priorityClassName"] == "high"
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("True", Reason.LAYOUT_APPLIED)


def test_a_dry_run_without_an_answer_does_not_make_a_refusal_forgotten() -> None:
    world = World().run()
    world.refusal = "no PriorityClass with name high was found"
    world.edit(**HIGH_PRIORITY).settle()

    world.refusal, world.is_silent = "a dry run that was not answered: 503", True
    world.settle().wait(10).settle()
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)
    assert "no PriorityClass" in world.condition(Condition.LAYOUT_APPLIED).message

    world.pod_is_gone("head").settle().wait(10).settle()
    assert world.status["attempt"] == 1
    assert all("priorityClassName" not in group["template"]["spec"] for group in groups_of(world.made[-1]))


def groups_of(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster["spec"]["workerGroupSpecs"]
    return found


def test_a_trainer_that_fails_while_a_dry_run_is_not_answered_is_seen() -> None:
    world = World().run()
    world.refusal, world.is_silent = "a dry run that was not answered: 503", True

    world.edit(**TWO_CRITICS).settle()
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("Unknown", Reason.API_REQUEST_FAILED)
    assert "503" in world.condition(Condition.LAYOUT_APPLIED).message
    assert "stop" not in world.status
    world.ray_says(RayState.FAILED).settle()
    assert world.status["attempt"] == 1


def test_a_layout_that_the_rules_refuse_leaves_the_job_alone_too() -> None:
    world = World().run().edit(placement={"actor": "actor", "critic": "nowhere"}).settle()

    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)
    assert "spec.placement.critic: 'nowhere'" in world.condition(Condition.LAYOUT_APPLIED).message
    assert world.status["phase"] == Phase.RUNNING


def test_with_such_an_edit_a_retry_has_the_layout_before_and_suspension_works() -> None:
    world = World().run().edit(**ILLEGAL).settle()

    world.pod_is_gone("head").settle().wait(10).settle()
    assert world.status["attempt"] == 1
    assert [group["groupName"] for group in world.made[-1]["spec"]["workerGroupSpecs"]] == ["actor", "critic"]
    assert world.verdict(Condition.LAYOUT_APPLIED) == ("False", Reason.INVALID_SPEC)

    world.suspend().settle()
    assert world.status["phase"] == Phase.SUSPENDED


def test_a_correction_of_such_an_edit_is_applied() -> None:
    world = World().run().edit(**ILLEGAL).settle()

    world.edit(**TWO_CRITICS).settle().trainer_stops_gracefully().settle()

    assert world.verdict(Condition.LAYOUT_APPLIED) == ("True", Reason.LAYOUT_APPLIED)
    assert world.status["ready"] == "0/4"


def test_a_job_that_was_never_edited_says_nothing_of_layouts() -> None:
    world = World().run()

    assert Condition.LAYOUT_APPLIED not in [condition["type"] for condition in world.status["conditions"]]
