"""Jobs with models and data by address: what the loop reads for them, and what it does."""

from typing import Any

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import Manifest
from tests.unit.operator.loop.memory_cluster import GOOD, SPEC, MemoryCluster, make_loop

FETCHED: dict[str, Any] = {**SPEC, "model": {"actor": {"path": "hf://acme/tiny"}}}
PODS: list[Manifest] = [
    {
        "metadata": {"name": "good-fetch-x", "labels": {"ppojob.dev/job": "good", "ppojob.dev/task": "fetch"}},
        "status": {"containerStatuses": [{"name": "fetch", "state": {"running": {}}}]},
    }
]


def cluster_of(**changes: Any) -> MemoryCluster:
    cluster = MemoryCluster(GOOD)
    cluster.jobs[GOOD] = {**cluster.jobs[GOOD], "spec": {**FETCHED, **changes}}
    return cluster


def completed(cluster: MemoryCluster) -> None:
    cluster.fetch_jobs[GOOD] = {
        **cluster.fetch_jobs[GOOD],
        "status": {"conditions": [{"type": "Complete", "status": "True"}]},
    }


async def test_the_job_is_applied_and_its_pod_is_none_of_rays() -> None:
    loop = make_loop(cluster := cluster_of())

    await loop.reconcile(GOOD)
    cluster.pods[GOOD] = PODS
    loop.enqueue(GOOD)
    await loop.reconcile(GOOD)

    assert cluster.applied == ["ServiceAccount", "ConfigMap", "Job"]
    assert cluster.verdict(GOOD, Condition.SOURCES_FETCHED) == (
        Reason.FETCHING,
        "pod good-fetch-x fetches models and data",
    )
    assert [state.phase for state in loop.job_states().values()] == [Phase.FETCHING]


async def test_what_is_complete_is_not_asked_for_again() -> None:
    loop = make_loop(cluster := cluster_of())
    await loop.reconcile(GOOD)
    completed(cluster)
    loop.enqueue(GOOD)
    await loop.reconcile(GOOD)
    assert cluster.applied[3:] == ["ServiceAccount", "Secret", "ConfigMap", "RayCluster"]
    cluster.calls.clear()
    loop.enqueue(GOOD)

    await loop.reconcile(GOOD)

    assert ("read_fetch_job", GOOD) not in cluster.calls


async def test_for_a_job_without_addresses_nothing_is_read() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))

    await loop.reconcile(GOOD)

    assert ("read_fetch_job", GOOD) not in cluster.calls


async def test_another_owners_job_does_not_count() -> None:
    loop = make_loop(cluster := cluster_of())
    await loop.reconcile(GOOD)
    completed(cluster)
    cluster.fetch_jobs[GOOD] = {**cluster.fetch_jobs[GOOD], "metadata": {"name": "good-fetch"}}
    loop.enqueue(GOOD)

    await loop.reconcile(GOOD)

    assert cluster.verdict(GOOD, Condition.SOURCES_FETCHED)[0] == Reason.FETCHING


async def test_a_suspended_jobs_fetch_is_deleted() -> None:
    loop = make_loop(cluster := cluster_of())
    await loop.reconcile(GOOD)
    cluster.jobs[GOOD]["spec"] = {**FETCHED, "runPolicy": {"suspend": True}}
    loop.enqueue(GOOD)

    await loop.reconcile(GOOD)

    assert cluster.deleted == ["good-fetch"]


async def test_a_pod_that_has_fetched_is_no_pod_of_an_earlier_attempt() -> None:
    loop = make_loop(cluster := cluster_of())
    await loop.reconcile(GOOD)
    completed(cluster)
    loop.enqueue(GOOD)
    await loop.reconcile(GOOD)
    labels = {"ppojob.dev/job": "good", "ray.io/cluster": cluster.clusters[GOOD][0]["metadata"]["name"]}
    waiting = [{"type": "PodScheduled", "status": "False", "message": "too little memory"}]
    head: Manifest = {"metadata": {"name": "head", "labels": labels}, "status": {"conditions": waiting}}
    cluster.pods[GOOD] = [*PODS, head]
    loop.enqueue(GOOD)

    await loop.reconcile(GOOD)

    assert cluster.verdict(GOOD, Condition.POOLS_READY) == (Reason.UNSCHEDULABLE, "head: too little memory")
