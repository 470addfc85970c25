"""A job whose image no further try can pull fails early, and says how to correct it."""

from dataclasses import replace

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import FetchPod, Pod, Ray, Trouble
from ppojob_operator.reading_pods import read_fetch_pod, read_pod
from tests.unit.operator.reconcile.happenings import MODEL
from tests.unit.operator.reconcile.worlds import World

INVALID = 'InvalidImageName: Failed to apply default image tag "Trainer:1": invalid reference format'
MISSING = 'ErrImagePull: rpc error: code = NotFound desc = failed to pull "reg.example/trainer:9": not found'
FORBIDDEN = 'ImagePullBackOff: Back-off pulling image "reg.example/trainer:9": ErrImagePull: 401 Unauthorized'
SLOW = "ErrImagePull: dial tcp 10.0.0.9:443: i/o timeout"


def pulling(message: str, pool: str = "critic", world: World | None = None) -> World:
    """Return a job with a pod on a node whose image is not pulled."""
    world = (world or World()).settle()
    world.pods_become(ready=False, pool=pool, trouble=Trouble(Reason.IMAGE_PULL_FAILED, message))

    def placed(pod: Pod) -> Pod:
        return replace(pod, created=world.now, scheduled=world.now) if pod.trouble else pod

    return world.see(pods=tuple(map(placed, world.observed.pods)))


@pytest.mark.parametrize(("pool", "where"), [("critic", "pool critic"), ("head", "the head")])
def test_an_invalid_name_fails_the_job_at_once(pool: str, where: str) -> None:
    world = pulling(INVALID, pool).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.IMAGE_PULL_FAILED)
    message = world.condition(Condition.FAILED).message
    assert message.startswith(f"an image cannot be pulled: {where}: InvalidImageName")
    assert "check the image (spec.image, or that of the container in podTemplate) and spec.imagePullSecrets" in message
    assert message.endswith("`kubectl ppo retry arithmetic` runs the job again")


def test_the_end_of_the_job_has_one_event() -> None:
    world = pulling(INVALID).settle()

    assert world.words.count(world.condition(Condition.FAILED).message) == 1


@pytest.mark.parametrize("message", [MISSING, FORBIDDEN])
def test_what_a_registry_refuses_fails_the_job_after_two_minutes(message: str) -> None:
    world = pulling(message).settle()
    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.IMAGE_PULL_FAILED)

    world.wait(110).settle()
    assert world.status["phase"] == Phase.STARTING
    assert world.plan().requeue_after == 10

    world.wait(10).settle()
    assert world.verdict(Condition.FAILED) == ("True", Reason.IMAGE_PULL_FAILED)


def test_the_time_before_a_pod_has_a_node_does_not_count() -> None:
    world = pulling(MISSING)
    world.see(pods=tuple(replace(pod, created=world.now, scheduled=None) for pod in world.observed.pods))
    world.wait(500)
    world.see(pods=tuple(replace(pod, scheduled=world.now) for pod in world.observed.pods))

    assert world.settle().status["phase"] == Phase.STARTING


def test_a_registry_that_does_not_answer_is_waited_for() -> None:
    assert pulling(SLOW).wait(1700).settle().status["phase"] == Phase.STARTING


def test_a_corrected_image_runs_after_a_request() -> None:
    world = pulling(INVALID).settle()

    world.edit(image="trainer:2").ask_for_a_retry().settle()
    world.pods_become(ready=True).see(ray=Ray()).settle()

    assert world.status["phase"] == Phase.STARTING
    assert world.verdict(Condition.SUBMITTED) == ("True", Reason.TRAINER_SUBMITTED)


def test_a_job_that_has_run_keeps_waiting_and_gets_the_corrected_image() -> None:
    world = World().run()
    world.edit(image="Trainer:2").settle().trainer_stops_gracefully().settle()
    pulling(INVALID, world=world)

    world.wait(1000).settle()
    assert world.status["phase"] == Phase.RESTARTING
    assert world.verdict(Condition.POOLS_READY) == ("False", Reason.IMAGE_PULL_FAILED)

    world.edit(image="trainer:3").settle()
    assert world.status["attempt"] == 2


def test_the_pod_that_fetches_has_the_same_limit() -> None:
    world = World(model=MODEL).settle()
    world.see(fetch_pods=(FetchPod("fetch-x", world.now, trouble=MISSING, has_image_trouble=True),))

    assert world.wait(119).settle().status["phase"] == Phase.FETCHING
    world.wait(1).settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.IMAGE_PULL_FAILED)


def test_the_time_of_the_node_and_the_kind_of_trouble_are_read() -> None:
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-03-01T12:00:00Z"}
    waiting = {"name": "ray-worker", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
    raw = {"metadata": {"name": "a"}, "spec": {"nodeName": "n"},
           "status": {"conditions": [scheduled], "containerStatuses": [waiting]}}  # fmt: skip

    pod = read_pod(raw)

    assert (pod.node, f"{pod.scheduled}") == ("n", "2026-03-01 12:00:00+00:00")
    assert read_fetch_pod(raw).has_image_trouble
    assert read_pod({"metadata": {"name": "a"}}).scheduled is None
