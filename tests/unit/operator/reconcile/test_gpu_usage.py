"""status.gpuUsage: GPU-hours from the binding of the pods to their end, and the share of them that was idle."""

from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Phase
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.plan import Ray
from ppojob_operator.reading import read_job
from ppojob_operator.reconcile import job_state
from tests.unit.operator.reconcile.worlds import World

HOUR = 3600
BUSY = [{"name": "actor", "busyFraction": 0.75}, {"name": "critic", "busyFraction": 0.6}]
"""Of the three GPUs, 2 x 0.75 + 0.6 = 2.1 computed in the last step."""


def bound() -> World:
    """Return a job whose pods, with three GPUs, have just been bound to nodes."""
    world = World().settle()
    world.pods_become(ready=False).pods_are_bound()
    return world.settle()


def running(**report: Any) -> World:
    """Return a job whose pods were bound an hour before its trainer's first report."""
    world = bound().wait(HOUR)
    world.pods_become(ready=True).pods_are_bound().see(ray=Ray()).settle()
    world.trainer_reports(**report)
    return world.settle()


def hours(world: World) -> tuple[float, float]:
    """Return GPU-hours and idle GPU-hours."""
    usage = world.status["gpuUsage"]
    return float(usage["gpuHours"]), float(usage["idleGPUHours"])


def test_pods_that_wait_for_a_node_hold_nothing() -> None:
    world = World().settle()
    world.pods_become(ready=False).settle().wait(HOUR).settle()

    assert "gpuUsage" not in world.status


def test_the_time_until_the_first_step_is_idle() -> None:
    world = bound()
    assert world.status["gpuUsage"] == {
        "gpuHours": "0.0000",
        "idleGPUHours": "0.0000",
        "gpus": 3,
        "busyFraction": "0.0000",
        "time": "2026-03-01T12:00:00Z",
    }

    assert hours(running()) == (3, 3)


def test_in_a_step_a_gpu_is_idle_while_no_role_of_its_pool_computes() -> None:
    world = running(pools=BUSY)
    world.wait(HOUR).trainer_reports(pools=BUSY).settle()

    assert hours(world) == (6, pytest.approx(3 + 0.9))


@pytest.mark.parametrize("activity", ["Loading", "Saving", "Exporting"])
def test_outside_the_steps_all_gpus_are_idle(activity: str) -> None:
    world = running(pools=BUSY)
    world.wait(HOUR).trainer_reports(activity, 1, pools=BUSY).settle()
    assert hours(world) == (6, pytest.approx(3 + 0.9))
    world.wait(HOUR).trainer_reports("Training", 2, pools=BUSY).settle()

    assert hours(world) == (9, pytest.approx(6 + 0.9))


def test_the_first_step_is_idle_until_its_end_shows_who_computed() -> None:
    world = running()
    world.wait(HOUR).trainer_reports(pools=BUSY).settle()
    assert hours(world) == (6, 6)
    world.wait(HOUR).trainer_repeats(pools=BUSY).settle()

    assert hours(world) == (9, pytest.approx(6 + 0.9))


def test_without_other_changes_it_is_written_every_ten_minutes() -> None:
    world = running(pools=BUSY)

    written = [world.wait(10).trainer_repeats(pools=BUSY).look().status is not None for _ in range(120)]

    assert [10 * (i + 1) for i, each in enumerate(written) if each] == [600, 1200]
    assert hours(world)[0] == pytest.approx(3 + 3 / 3)


def test_an_operator_that_was_unavailable_counts_the_time_of_its_absence() -> None:
    world = running().wait(24 * HOUR).settle()

    assert hours(world)[0] == 3 + 3 * 24


def test_the_time_between_two_attempts_is_idle_while_pods_hold_gpus() -> None:
    world = running(pools=BUSY)
    world.trainer_fails("TrainerFailed", FailureKind.USER).settle()
    assert world.status["phase"] == Phase.RESTARTING
    before = hours(world)
    world.pods_are_bound().wait(HOUR).settle()

    assert hours(world) == (before[0] + 3, before[1] + 3)


def test_a_pod_that_has_ended_holds_no_gpu() -> None:
    world = running()
    pods = (replace(pod, is_over=pod.pool == "actor") for pod in world.observed.pods)
    world.see(pods=tuple(pods)).look()

    assert world.status["gpuUsage"]["gpus"] == 1


def test_a_suspended_job_holds_nothing() -> None:
    world = running().suspend().settle().trainer_stops_gracefully().settle()
    assert world.status["phase"] == Phase.SUSPENDED
    before = world.status["gpuUsage"]
    assert before["gpus"] == 0

    assert world.wait(24 * HOUR).look().status is None
    assert world.status["gpuUsage"] == before


def test_a_job_that_runs_again_continues_to_count() -> None:
    world = running().suspend().settle().trainer_stops_gracefully().settle().wait(HOUR)
    world.suspend(False).settle()
    world.pods_become(ready=False).pods_are_bound().settle()
    world.wait(HOUR).settle()

    assert hours(world) == (6, 6)


def test_the_clock_of_another_replica_takes_nothing_away() -> None:
    world = running()
    before = hours(world)
    world.wait(-30).trainer_reports(step=5).suspend().settle()

    assert hours(world) == before


def test_its_metrics_are_in_seconds() -> None:
    world = running(pools=BUSY)
    world.wait(HOUR).trainer_reports(pools=BUSY).settle()

    assert job_state(read_job(world.raw), None).gpu_seconds == {"busy": 2.1 * HOUR, "idle": 3.9 * HOUR}
