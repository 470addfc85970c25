"""Two write the status, the operator's loop and its status server: neither harms the other, nor a newer object."""

import asyncio
from collections.abc import Callable
from typing import Any

from ppojob_operator.api_server import ApiServer
from ppojob_operator.cluster import Cluster
from ppojob_operator.cluster_progress import ProgressCluster
from ppojob_operator.plan import Job
from ppojob_operator.reading import read_job
from ppojob_operator.status_server import JobIdentity

NUM_WRITES = 20
CONDITION = {
    "type": "Submitted",
    "status": "True",
    "reason": "TrainerSubmitted",
    "message": "attempt 0",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "observedGeneration": 1,
}


def job_of(kubectl: Any, manifest: dict[str, Any], name: str) -> Job:
    """Create a job and return it as the operator read it."""
    return read_job(kubectl.create({**manifest, "metadata": {"name": name}}))


def said(status: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Return what makes this status of any object."""
    return lambda _: status


async def test_a_status_for_an_object_that_was_re_created_is_not_written(
    operator: Any, kubectl: Any, manifest: dict[str, Any]
) -> None:
    old = job_of(kubectl, manifest, "recreated")
    kubectl("delete", "ppojob", "recreated")
    job_of(kubectl, manifest, "recreated")
    async with operator.connect() as client:
        cluster = Cluster(ApiServer(client, timeout=30.0), reporter="test")

        assert not await cluster.write_status(old, {"phase": "Failed"})
        assert kubectl.json("get", "ppojob", "recreated").get("status", {}).get("phase") != "Failed"

        kubectl("delete", "ppojob", "recreated")
        assert not await cluster.write_status(old, {"phase": "Failed"})


async def test_two_writers_at_the_same_time_keep_each_others_part(
    operator: Any, kubectl: Any, manifest: dict[str, Any]
) -> None:
    job = job_of(kubectl, manifest, "shared")
    key = JobIdentity(kubectl.namespace, "shared", job.uid)
    async with operator.connect() as client:
        api = ApiServer(client, timeout=30.0)
        cluster, progress = Cluster(api, reporter="test"), ProgressCluster(api)
        for step in range(1, NUM_WRITES + 1):
            report = {"progress": {"activity": "Training", "step": step, "totalSteps": NUM_WRITES}}
            decided = {"phase": "Running", "attempt": step, "conditions": [CONDITION]}
            assert await asyncio.gather(
                cluster.write_status(job, decided), progress.apply_progress(key, said(report))
            ) == [True, True]  # fmt: skip

    status = kubectl.json("get", "ppojob", "shared")["status"]
    assert (status["phase"], status["attempt"]) == ("Running", NUM_WRITES)
    assert status["progress"]["step"] == NUM_WRITES
