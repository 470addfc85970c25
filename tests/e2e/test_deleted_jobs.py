"""A PPOJob that is deleted while it trains releases its pods soon, without a checkpoint."""

import time
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.e2e.small_jobs import FEW_SAMPLES, await_step, small_pools

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

NAME = "deleted"
PODS_LIMIT_SECONDS = 60.0
CHANGES: dict[str, Any] = {
    **FEW_SAMPLES,
    "pools": small_pools(),
    "trainer": {"totalSteps": 50, "validateEverySteps": 0},
    "checkpoint": {"everySteps": 0, "export": "Never"},
}


def test_the_pods_of_a_deleted_job_end_within_a_minute_without_a_checkpoint(site: Site) -> None:
    site.apply(NAME, CHANGES)
    await_step(site, NAME, 1)

    begin = time.monotonic()
    site.kubectl("delete", "ppojob", NAME, "--timeout=60s", limit=90)
    site.await_no_pods(NAME)

    assert time.monotonic() - begin < PODS_LIMIT_SECONDS
    checkpoints = site.root(NAME) / "checkpoints"
    assert not list(checkpoints.glob("step-*"))
    log = (site.root(NAME) / "logs" / "attempt-0" / "driver.log").read_text()
    assert "the PPOJob was deleted" in log
