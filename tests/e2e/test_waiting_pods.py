"""Pods that wait for their head in KubeRay's init container hold GPUs: a deleted job releases them at once."""

from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.e2e.small_jobs import small_pools
from tools.cluster.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)

NAME = "head-without-a-node"
CHANGES: dict[str, Any] = {"pools": small_pools(), "head": {"nodeSelector": {"no-node-has": "this-label"}}}


def init_containers_that_run(site: Site) -> list[str]:
    pods = site.get("pods", f"--selector=ppojob.dev/job={NAME}")["items"]
    statuses = (status for pod in pods for status in pod["status"].get("initContainerStatuses", []))
    return [status["name"] for status in statuses if "running" in status["state"]]


def test_a_deleted_job_releases_the_pods_that_wait_for_its_head(site: Site) -> None:
    site.apply(NAME, CHANGES)
    wait_until(
        "the pods of both pools to wait for the head",
        lambda: "" if init_containers_that_run(site) == ["wait-gcs-ready"] * 2 else "not yet",
        limit=600,
        interval=1,
    )

    # It fails if the pods are there for 5 of the 10.5 minutes of their grace period.
    site.delete(NAME)
