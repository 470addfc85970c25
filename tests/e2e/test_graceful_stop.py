"""A real trainer saves when asked, is suspended, set free, and given another layout; no step is lost or done twice."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.e2e.small_jobs import FEW_SAMPLES, await_step, small_pools

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

NAME = "stopped"
STEPS = 12
TRAINING_LIMIT_SECONDS = 600.0
STOP_LIMIT_SECONDS = 300.0
CHANGES: dict[str, Any] = {
    **FEW_SAMPLES,
    "pools": small_pools(),
    "trainer": {"totalSteps": STEPS, "validateEverySteps": 0},
    "checkpoint": {"everySteps": 0, "export": "Never"},
}


@pytest.fixture(scope="module")
def story(site: Site) -> Iterator[list[Any]]:
    """The status at each turn: asked for a checkpoint, suspended, with another layout, at the end."""
    site.apply(NAME, CHANGES)
    await_step(site, NAME, 1)
    site.ppo("checkpoint", NAME, "--timeout=280")
    turns = [site.job(NAME)["status"]]
    site.patch(NAME, runPolicy={"suspend": True})
    site.await_condition(NAME, "Suspended", "True", limit=STOP_LIMIT_SECONDS)
    site.await_no_pods(NAME)
    turns.append(site.job(NAME)["status"])
    site.patch(NAME, runPolicy={"suspend": False})
    site.await_condition(NAME, "Progressing", "True", limit=TRAINING_LIMIT_SECONDS, reason="Training")
    site.patch(NAME, pools=small_pools(2))
    site.await_condition(NAME, "LayoutApplied", "True", limit=STOP_LIMIT_SECONDS)
    turns.append(site.job(NAME)["status"])
    site.await_condition(NAME, "Complete", "True", limit=TRAINING_LIMIT_SECONDS)
    yield [*turns, site.job(NAME)["status"]]
    site.kubectl("delete", "ppojob", NAME, "--ignore-not-found", "--timeout=120s", limit=150)


def test_a_requested_checkpoint_is_saved_and_the_run_continues(story: list[Any]) -> None:
    asked, suspended, _, _ = story

    assert 1 <= asked["checkpoint"]["step"] <= suspended["checkpoint"]["step"]
    assert asked["checkpoint"]["request"]
    assert asked["attempt"] == 0
    assert "stop" not in asked


def test_suspended_it_has_a_checkpoint_of_its_last_step_and_no_cluster(site: Site, story: list[Any]) -> None:
    _, suspended, _, _ = story

    assert suspended["phase"] == "Suspended"
    assert suspended["attempt"] == 1
    assert "rayCluster" not in suspended
    # No checkpoint is written in between but those of the stops, and the one that was asked for.
    assert suspended["stop"]["reason"] == "Suspending"
    log = (site.root(NAME) / "logs" / "attempt-1" / "driver.log").read_text()
    assert "resuming after step" in log


def test_the_layout_in_force_is_the_new_one(story: list[Any]) -> None:
    *_, relaid, done = story

    assert [pool["gpusPerNode"] for pool in relaid["effectiveLayout"]["pools"]] == [2, 1]
    assert done["stop"]["reason"] == "Reallocating"
    assert done["attempt"] == 2


def test_neither_was_a_retry_and_every_step_was_done_once(site: Site, story: list[Any]) -> None:
    *_, done = story

    assert done["retries"]["total"] == 0
    assert "lastFailure" not in done
    lines = (site.root(NAME) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, STEPS + 1)]
