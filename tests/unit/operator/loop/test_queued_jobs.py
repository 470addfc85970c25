"""What the loop reads of Kueue: nothing for a job without a queue, unless Kueue has suspended its RayCluster."""

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.unit.operator.loop.memory_cluster import BAD, GOOD, SPEC, MemoryCluster, make_loop

pytestmark = pytest.mark.virtual_time


async def test_kueue_is_asked_at_each_reconcile_of_a_job_that_waits_in_a_queue() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    cluster.jobs[GOOD]["spec"] = {**SPEC, "runPolicy": {"queueName": "gpus"}}
    await loop.reconcile(GOOD)
    cluster.clusters[GOOD] = [{**cluster.clusters[GOOD][0], "spec": {"suspend": True}}]
    cluster.clusters[GOOD][0]["metadata"]["uid"] = "uid-of-the-cluster"

    for words in ("no room", "still no room"):
        condition = {"type": "QuotaReserved", "status": "False", "message": words}
        metadata = {"labels": {"kueue.x-k8s.io/job-uid": "uid-of-the-cluster"}}
        cluster.workloads = [{"metadata": metadata, "status": {"conditions": [condition]}}]
        await loop.reconcile(GOOD)
        assert cluster.verdict(GOOD, Condition.ADMITTED) == ("Queued", f"the job waits in the queue gpus: {words}")
    assert cluster.calls.count(("list_workloads", GOOD)) == 3


async def test_without_kueue_a_job_with_a_queue_says_so_and_another_one_does_not_ask() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD, BAD))
    cluster.jobs[GOOD]["spec"] = {**SPEC, "runPolicy": {"queueName": "gpus"}}
    cluster.workloads = None

    await loop.reconcile(GOOD)
    await loop.reconcile(BAD)

    assert cluster.verdict(GOOD, Condition.ACCEPTED)[0] == Reason.KUEUE_MISSING
    assert ("list_workloads", BAD) not in cluster.calls


@pytest.mark.parametrize("labels", [{"kueue.x-k8s.io/queue-name": "default"}, {}], ids=["default queue", "no queue"])
async def test_kueue_is_asked_of_a_job_without_a_queue_whose_cluster_is_suspended(labels: dict[str, str]) -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    await loop.reconcile(GOOD)
    assert ("list_workloads", GOOD) not in cluster.calls
    [created] = cluster.clusters[GOOD]
    metadata = {**created["metadata"], "uid": "uid-of-the-cluster", "labels": labels}
    cluster.clusters[GOOD] = [{**created, "metadata": metadata, "spec": {"suspend": True}}]
    condition = {"type": "QuotaReserved", "status": "False", "message": "no room"}
    workload = {"labels": {"kueue.x-k8s.io/job-uid": "uid-of-the-cluster"}}
    cluster.workloads = [{"metadata": workload, "status": {"conditions": [condition]}}]

    await loop.reconcile(GOOD)

    reason, words = cluster.verdict(GOOD, Condition.ADMITTED)
    assert (reason, words.endswith(": no room")) == (Reason.QUEUED, True)
    assert cluster.jobs[GOOD]["status"].get("queueName") == labels.get("kueue.x-k8s.io/queue-name")
