"""The active deadline spans suspensions and times in the queue, and stands still in them."""

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import RayState
from tests.unit.operator.reconcile.queues import Queue
from tests.unit.operator.reconcile.worlds import START, World

EXCEEDED = ("True", Reason.ACTIVE_DEADLINE_EXCEEDED)
DAY = 86_400


def suspend(world: World) -> World:
    return world.suspend().settle().trainer_stops_gracefully().settle()


def resume(world: World) -> World:
    """Let a job go on until its trainer reports, which takes 20 s."""
    return world.suspend(False).run()


def test_it_continues_after_a_suspension_and_does_not_count_that() -> None:
    world = suspend(World(runPolicy={"activeDeadlineSeconds": 300}).run().wait(80))
    assert world.status["activeSeconds"] == 100

    resume(world.wait(DAY))
    assert world.status["startTime"] == "2026-03-02T12:01:40Z"
    world.wait(179).trainer_reports().settle()
    assert world.status["phase"] == Phase.RUNNING
    assert world.plan().requeue_after == 1
    world.wait(1).settle()

    assert world.verdict(Condition.FAILED) == EXCEEDED
    assert "the job was active for 300 s" in world.condition(Condition.FAILED).message


def test_what_was_counted_is_written_once_for_each_suspension() -> None:
    world = suspend(World().run())

    assert all(world.wait(DAY).look().status is None for _ in range(3))
    assert world.status["activeSeconds"] == 20
    resume(world)
    assert all(world.wait(1).look().status is None for _ in range(9))
    assert world.status["activeSeconds"] == 20
    assert suspend(world).status["activeSeconds"] == 49


def test_a_job_whose_time_is_over_while_it_is_suspended_ends_when_it_continues() -> None:
    world = suspend(World(runPolicy={"activeDeadlineSeconds": 300}).run()).wait(DAY)
    world.edit(runPolicy={"activeDeadlineSeconds": 10, "suspend": True}).settle()
    assert world.status["phase"] == Phase.SUSPENDED

    world.suspend(False).settle()

    assert world.verdict(Condition.FAILED) == EXCEEDED
    assert world.observed.clusters == ()


def test_a_job_that_is_pre_empted_again_and_again_ends_at_its_deadline() -> None:
    queue, num_turns = Queue(activeDeadlineSeconds=300), 0

    while queue.world.status["phase"] != Phase.FAILED:
        num_turns += 1
        assert num_turns <= 4
        queue.runs().world.wait(70).trainer_reports().settle()
        if queue.world.status["phase"] != Phase.FAILED:
            queue.evicts().settle()
            queue.pods_are_gone().settle().wait(DAY).settle()
            assert queue.world.status["activeSeconds"] == 90 * num_turns

    assert num_turns == 4
    assert queue.world.verdict(Condition.FAILED) == EXCEEDED


def test_time_in_the_queue_and_suspended_in_turn_counts_once() -> None:
    queue = Queue().runs()

    suspend(queue.world.wait(30)).wait(DAY).suspend(False).settle()
    queue.world.wait(DAY).settle()
    assert queue.world.status["phase"] == Phase.QUEUED
    queue.world.suspend().settle().wait(DAY).settle()

    assert queue.world.status["activeSeconds"] == 50


def test_a_job_of_an_older_operator_counts_from_its_start() -> None:
    world = World(runPolicy={"activeDeadlineSeconds": 300}).run()
    assert world.status["startTime"] == START.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert "activeSeconds" not in world.status

    world.ray_says(RayState.STOPPED).settle().wait(280).settle()

    assert world.verdict(Condition.FAILED) == EXCEEDED
