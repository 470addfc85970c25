"""A worker's pod and then the head's are killed under a real trainer; each time it trains again from its checkpoint.

How long that took is printed (`--capture=no` shows it) and never asserted.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.e2e.small_jobs import FEW_SAMPLES, await_resumption, await_step, records, small_pools

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]

NAME = "killed"
STEPS = 12
EVERY_STEPS = 2
LIMIT_SECONDS = 600.0
CHANGES: dict[str, Any] = {
    **FEW_SAMPLES,
    "pools": small_pools(1),
    "trainer": {"totalSteps": STEPS, "validateEverySteps": 0},
    "checkpoint": {"everySteps": EVERY_STEPS, "export": "Never"},
}
VICTIMS = {"worker": "ppojob.dev/pool=critic", "head": "ray.io/node-type=head"}
REASONS = {"worker": ("WorkerLost", "PodLost"), "head": ("HeadLost",)}


@dataclass(frozen=True)
class Recovery:
    """What one kill led to."""

    last_step: int
    """Finished before."""
    resumed_after: int
    """Step of the checkpoint that the next attempt began with."""
    seconds: float
    """From the kill to the end of the next attempt's first step."""
    cluster_before: str
    """The RayCluster when the pod was killed."""
    status: Any


@pytest.fixture(scope="module")
def recoveries(site: Site) -> Iterator[dict[str, Recovery]]:
    """By victim; the job runs to its end afterwards."""
    site.apply(NAME, CHANGES)
    # The first checkpoint is down and a step after it is done, so that there is something to lose.
    await_step(site, NAME, EVERY_STEPS + 1)
    found = {}
    for attempt, (victim, labels) in enumerate(VICTIMS.items(), start=1):
        found[victim] = kill(site, labels, attempt)
        print(f"\n{victim} killed: training again after {found[victim].seconds:.0f} s", end="")
    site.await_condition(NAME, "Complete", "True", limit=LIMIT_SECONDS)
    yield found
    site.kubectl("delete", "ppojob", NAME, "--ignore-not-found", "--timeout=120s", limit=150)


def kill(site: Site, selector: str, attempt: int) -> Recovery:
    pods = site.get("pods", f"--selector=ppojob.dev/job={NAME},{selector}")["items"]
    assert len(pods) == 1, [pod["metadata"]["name"] for pod in pods]
    cluster = site.job(NAME)["status"]["rayCluster"]["name"]
    last, moment = max(records(site, NAME)), time.time()
    site.kubectl("delete", "pod", pods[0]["metadata"]["name"], "--force", "--grace-period=0")
    resumed_after = await_resumption(site, NAME, attempt)
    finished = await_step(site, NAME, resumed_after + 1, since=moment)
    return Recovery(last, resumed_after, finished - moment, cluster, site.job(NAME)["status"])


@pytest.mark.parametrize("victim", VICTIMS)
def test_at_most_the_steps_since_the_last_checkpoint_are_lost(recoveries: dict[str, Recovery], victim: str) -> None:
    recovery = recoveries[victim]

    assert 0 <= recovery.last_step - recovery.resumed_after <= EVERY_STEPS


@pytest.mark.parametrize("victim", VICTIMS)
def test_the_loss_is_named_and_is_not_the_users(recoveries: dict[str, Recovery], victim: str) -> None:
    status = recoveries[victim].status

    assert status["retries"]["user"] == 0
    assert status["lastFailure"]["attempt"] == status["attempt"] - 1
    assert status["lastFailure"]["reason"] in REASONS[victim]
    # With the head its logs are out of the operator's reach; they stay in the storage.
    assert victim == "head" or status["lastFailure"]["logTail"]


def test_only_the_loss_of_the_head_costs_the_raycluster(recoveries: dict[str, Recovery]) -> None:
    clusters = {victim: recovery.status["rayCluster"]["name"] for victim, recovery in recoveries.items()}

    assert clusters["worker"] != clusters["head"]
    assert clusters["worker"] == recoveries["worker"].cluster_before


def test_every_step_was_done_in_the_end(site: Site, recoveries: dict[str, Recovery]) -> None:
    assert sorted(records(site, NAME)) == [*range(1, STEPS + 1)]
    assert site.job(NAME)["status"]["retries"]["infrastructure"] == len(VICTIMS)
