"""`kubectl ppo wait`: ends when the job ends, with an exit status that a script can use."""

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from ppojob_trainer.kubectl import waiting
from tests.unit.trainer.kubectl.conftest import FINISHED, MemoryCluster, job

Plugin = Callable[..., Result]

FAILED = {"type": "Failed", "status": "True", "reason": "TrainerFailed", "message": "exit code 1"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Sleeping moves the clock."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(waiting.time, "sleep", sleep)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def follow(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> Callable[..., MemoryCluster]:
    """Let the cluster return one state of the job after another, and then the last one."""

    def states(*jobs: dict[str, Any]) -> MemoryCluster:
        left = list(jobs)
        monkeypatch.setattr(cluster, "get", lambda *_: left.pop(0) if len(left) > 1 else left[0])
        return cluster

    return states


def ended(condition: dict[str, str]) -> dict[str, Any]:
    return job(phase=condition["type"], conditions=[condition])


def test_a_complete_job_ends_the_wait_with_0(
    follow: Callable[..., MemoryCluster], ppo: Plugin, clock: list[float]
) -> None:
    follow(job(), job(), ended(FINISHED))

    result = ppo("wait", "products")

    assert (result.exit_code, result.stdout) == (
        0,
        "team/products: Complete: TrainerSucceeded: all steps are done\n",
    )
    assert clock[0] > 0


def test_a_failed_job_ends_the_wait_with_1(follow: Callable[..., MemoryCluster], ppo: Plugin) -> None:
    follow(job(), ended(FAILED))

    result = ppo("wait", "products")

    assert (result.exit_code, result.stdout) == (1, "team/products: Failed: TrainerFailed: exit code 1\n")


def test_the_timeout_ends_the_wait_with_1(
    follow: Callable[..., MemoryCluster], ppo: Plugin, clock: list[float]
) -> None:
    follow(job())

    result = ppo("wait", "products", "--timeout", "10")

    assert (result.exit_code, result.stderr) == (
        1,
        "error: team/products has not ended within 10 s: its phase is Running\n",
    )
    assert clock[0] == 10


def test_another_job_of_the_same_name_is_not_waited_for(follow: Callable[..., MemoryCluster], ppo: Plugin) -> None:
    other = ended(FINISHED)
    other["metadata"]["uid"] = "another"
    follow(job(), other)

    result = ppo("wait", "products")

    assert (result.exit_code, result.stderr) == (
        1,
        "error: team/products was deleted; another job has its name now\n",
    )
