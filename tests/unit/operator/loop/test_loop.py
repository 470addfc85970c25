"""The loop: one job's trouble is its own, an error is said and tried again, and the watches are checked."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.api_server import ApiError, ApiFailed, ApiRefused, ApiUnavailable
from ppojob_operator.loop import Hooks, Loop
from ppojob_operator.plan import Job, JobKey, Manifest, Plan
from ppojob_operator.reading import read_job
from tests.unit.operator.loop.memory_cluster import BAD, GOOD, OURS, MemoryCluster, job_of, make_loop, run_for
from tests.unit.operator.virtual_time import now

pytestmark = pytest.mark.virtual_time


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("loop", "work_queue"):
        monkeypatch.setattr(f"ppojob_operator.{module}.monotonic", now)


async def test_a_reconcile_applies_writes_the_status_and_reports() -> None:
    cluster = MemoryCluster(GOOD)

    assert await make_loop(cluster).reconcile(GOOD) == "ok"

    assert cluster.applied == ["ServiceAccount", "Secret", "ConfigMap", "RayCluster"]
    assert cluster.verdict(GOOD, Condition.ACCEPTED)[0] == Reason.VALID
    assert cluster.events == [Reason.VALID]


async def test_an_event_that_cannot_be_written_is_written_at_the_next_reconcile() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    cluster.errors["emit", GOOD] = ApiUnavailable("503")
    with pytest.raises(ApiUnavailable):
        await loop.reconcile(GOOD)
    assert cluster.verdict(GOOD, Condition.ACCEPTED)[0] == Reason.VALID

    del cluster.errors["emit", GOOD]
    await loop.reconcile(GOOD)
    await loop.reconcile(GOOD)

    assert cluster.events == [Reason.VALID]


async def test_an_event_that_is_refused_keeps_nothing_from_being_done(caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    cluster.errors["emit", GOOD] = ApiRefused("403 the namespace is being deleted")

    assert await loop.reconcile(GOOD) == "ok"

    del cluster.errors["emit", GOOD]
    await loop.reconcile(GOOD)
    assert cluster.events == []
    assert "403 the namespace is being deleted" in caplog.text


async def test_a_job_that_is_gone_is_forgotten() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    await loop.reconcile(GOOD)
    assert [state.phase for state in loop.job_states().values()] == ["Starting"]
    del cluster.jobs[GOOD]

    assert await loop.reconcile(GOOD) == "gone"
    assert loop.job_states() == {}


async def test_enqueued_jobs_are_reconciled() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD, BAD))
    loop.enqueue(GOOD)
    loop.enqueue(GOOD)

    await run_for(loop, 0.5)

    assert cluster.calls.count(("read_job", GOOD)) == 1
    assert ("read_job", BAD) not in cluster.calls


@pytest.mark.parametrize("error", [ApiUnavailable("503"), RuntimeError("a fault of ours"), KeyError("uid")])
async def test_the_trouble_of_one_job_is_its_own(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD, BAD), workers=1)
    cluster.errors["read_job", BAD] = error
    loop.enqueue(BAD)
    loop.enqueue(GOOD)

    await run_for(loop, 0.6)

    assert cluster.verdict(GOOD, Condition.ACCEPTED)[0] == Reason.VALID
    assert "ns/bad" in caplog.text


async def test_after_an_error_there_is_a_pause_that_grows() -> None:
    loop = make_loop(cluster := MemoryCluster(BAD))
    cluster.errors["read_job", BAD] = ApiUnavailable("503")
    loop.enqueue(BAD)

    await run_for(loop, 2.5)

    assert cluster.calls.count(("read_job", BAD)) == 2, "at 0.2 s and 1.2 s; then at 3.2 s"


async def test_a_reconcile_that_hangs_is_ended_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    class Hanging(MemoryCluster):
        async def list_pods(self, key: JobKey) -> list[Manifest]:
            await asyncio.sleep(60)
            raise AssertionError

    loop = make_loop(Hanging(GOOD), pass_timeout=0.1)
    loop.enqueue(GOOD)

    await run_for(loop, 0.5)

    assert "the reconcile took more than 0.1 s" in caplog.text


@pytest.mark.parametrize("kind", [ApiRefused, ApiFailed])
async def test_what_the_api_server_refuses_is_said_in_the_status(kind: type[ApiError]) -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    words = ".spec.workerGroupSpecs[0].template.spec.foo: field not declared in schema"
    cluster.errors["apply", GOOD] = kind(words)

    with pytest.raises(kind):
        await loop.reconcile(GOOD)

    assert cluster.verdict(GOOD, Condition.POOLS_READY) == (Reason.CLUSTER_REFUSED, words)
    assert Reason.CLUSTER_REFUSED in cluster.events


async def test_a_defect_of_the_operator_is_a_condition_of_the_job() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    cluster.errors["apply", GOOD] = AttributeError("'list' object has no attribute 'items'")
    loop.enqueue(GOOD)

    await run_for(loop, 2.0)

    reason, message = cluster.verdict(GOOD, Condition.PROGRESSING)
    assert reason == Reason.OPERATOR_FAULT
    assert "AttributeError: 'list' object has no attribute 'items'" in message
    assert cluster.events.count(Reason.OPERATOR_FAULT) == 1, "said once, though it was tried twice"
    assert cluster.calls.count(("apply", GOOD)) == 2

    del cluster.errors["apply", GOOD]
    await loop.reconcile(GOOD)
    assert cluster.verdict(GOOD, Condition.PROGRESSING)[0] != Reason.OPERATOR_FAULT


async def test_a_spec_that_the_operator_cannot_read_is_a_condition_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("pools")

    loop = make_loop(cluster := MemoryCluster(GOOD))
    monkeypatch.setattr("ppojob_operator.loop.read_job", broken)
    loop.enqueue(GOOD)

    await run_for(loop, 0.5)

    reason, message = cluster.verdict(GOOD, Condition.PROGRESSING)
    assert reason == Reason.OPERATOR_FAULT
    assert "KeyError: 'pools'" in message
    assert cluster.events.count(Reason.OPERATOR_FAULT) == 1


async def test_a_job_that_was_deleted_is_none_that_the_watch_missed() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD), idle_interval=0.3)
    # Two sweeps find it, and the watch reports it.
    loop.enqueue(GOOD)
    await run_for(loop, 1.0)
    del cluster.jobs[GOOD]

    loop.enqueue(GOOD)
    await loop.reconcile(GOOD)

    assert loop.watch_problem() is None


async def test_what_the_api_server_cannot_do_now_is_not_said_in_the_status() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    cluster.errors["apply", GOOD] = ApiUnavailable("503")

    with pytest.raises(ApiUnavailable):
        await loop.reconcile(GOOD)

    assert cluster.jobs[GOOD]["status"]["conditions"] == []


async def test_nothing_is_deleted_or_reported_before_the_status_is_written() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    cluster.jobs[GOOD]["status"] = {
        "conditions": [
            {
                "type": kind,
                "status": "True",
                "reason": "R",
                "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
                "observedGeneration": 1,
            }
            for kind in (Condition.ACCEPTED, Condition.SUBMITTED)
        ],
        "startTime": "2026-01-01T00:00:00Z",
        "attempt": 0,
    }
    uid = cluster.jobs[GOOD]["metadata"]["uid"]
    ours = [{"kind": "PPOJob", "name": GOOD.name, "uid": uid, "controller": True}]
    # Another's may carry the label: it is none of this job's.
    cluster.clusters[GOOD] = [
        {"metadata": {"name": "good-old", "labels": {}, "ownerReferences": ours}},
        {"metadata": {"name": "anothers", "labels": {}, "ownerReferences": [{**ours[0], "uid": "other"}]}},
        {"metadata": {"name": "nobodys", "labels": {}}},
    ]
    cluster.errors["write_status", GOOD] = ApiUnavailable("503")

    with pytest.raises(ApiUnavailable):
        await loop.reconcile(GOOD)
    assert cluster.deleted == []
    assert cluster.events == []

    del cluster.errors["write_status", GOOD]
    await loop.reconcile(GOOD)
    assert cluster.deleted == ["good-old"]


async def test_a_status_for_an_object_that_is_gone_harms_nobody() -> None:
    class Vanishing(MemoryCluster):
        async def write_status(self, job: Job, status: Mapping[str, Any]) -> bool:
            return False

    cluster = Vanishing(GOOD)
    cluster.jobs[GOOD]["status"] = {"operator": OURS.to_wire()}

    assert await make_loop(cluster).reconcile(GOOD) == "ok"
    assert cluster.events == []


async def test_jobs_that_no_watch_reported_are_found_and_the_watch_is_blamed() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD, BAD), idle_interval=0.2)
    loop.enqueue(GOOD)

    await run_for(loop, 0.3)
    assert ("read_job", BAD) in cluster.calls
    assert loop.watch_problem() is None, "the watch has the time between two sweeps"

    await run_for(loop, 0.7)
    assert loop.watch_problem() == "the watch never reported 1 jobs that exist, such as ns/bad"

    loop.enqueue(BAD)
    assert loop.watch_problem() is None


async def test_a_resync_lists_the_watched_namespaces_and_the_watch_is_blamed_for_each() -> None:
    keys = [JobKey(namespace, "good") for namespace in ("a", "b", "c")]
    loop = make_loop(cluster := MemoryCluster(*keys), idle_interval=0.2, watch_namespaces=("a", "b"))

    await run_for(loop, 0.5)

    listed = {key.namespace for name, key in cluster.calls if name == "list_jobs"}
    assert listed == {key.namespace for name, key in cluster.calls if name == "read_job"} == {"a", "b"}
    assert loop.watch_problem() == "the watch never reported 2 jobs that exist, such as a/good"
    loop.enqueue(keys[0])
    assert loop.watch_problem() == "the watch never reported 1 jobs that exist, such as b/good"


async def test_without_a_list_a_resync_lists_all_namespaces_at_once() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD), idle_interval=0.2)

    await run_for(loop, 0.3)

    assert [key for name, key in cluster.calls if name == "list_jobs"] == [JobKey("", "")]


async def test_a_namespace_that_cannot_be_listed_does_not_keep_others_from_a_resync() -> None:
    cluster = MemoryCluster(JobKey("a", "good"), JobKey("b", "good"))
    cluster.errors["list_jobs", JobKey("a", "")] = ApiRefused("403 the namespace was deleted")
    loop = make_loop(cluster, idle_interval=0.2, watch_namespaces=("a", "b"))

    await run_for(loop, 0.5)

    assert {key for name, key in cluster.calls if name == "read_job"} == {JobKey("b", "good")}
    assert loop.watch_problem() == "the watch never reported 1 jobs that exist, such as b/good"


async def test_retries_are_counted_once_they_are_written() -> None:
    counted: list[tuple[str, int]] = []
    loop = make_loop(MemoryCluster(GOOD))
    loop._hooks = Hooks(count_retries=lambda cause, count: counted.append((cause, count)))
    job = read_job({**job_of(GOOD), "status": {"retries": {"user": 1, "infrastructure": 0, "total": 1}}})

    for retries in (
        {"user": 1, "infrastructure": 0},
        {"user": 2, "infrastructure": 0},
        {"user": 1, "infrastructure": 1},
        {"user": 1, "infrastructure": 0, "ignored": 2},
    ):
        await loop._write(job, Plan(status={"retries": retries}))

    assert counted == [("user", 1), ("infrastructure", 1), ("ignored", 2)]


async def pods_read_by(cluster: MemoryCluster, loop: Loop, num_looks: int = 1) -> int:
    """Return how often some looks at the good job list its pods."""
    before = cluster.calls.count(("list_pods", GOOD))
    for _ in range(num_looks):
        await loop.reconcile(GOOD)
    return cluster.calls.count(("list_pods", GOOD)) - before


async def test_objects_that_no_watch_reported_are_not_read_again() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))

    assert await pods_read_by(cluster, loop, 2) == 2, "the first look made objects, so the second reads them"
    assert await pods_read_by(cluster, loop, 5) == 0
    assert cluster.calls.count(("read_job", GOOD)) == 7

    loop.enqueue(GOOD)
    assert await pods_read_by(cluster, loop, 2) == 1


async def test_a_config_map_that_somebody_deleted_is_missed_at_once_before_the_trainer_has_it() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    await loop.reconcile(GOOD)
    await loop.reconcile(GOOD)
    del cluster.configs[GOOD]

    assert await pods_read_by(cluster, loop) == 0
    assert cluster.applied[-1] == "ConfigMap"


async def test_what_a_watch_reports_during_a_reconcile_is_read_by_the_next() -> None:
    class Changing(MemoryCluster):
        async def read_claim(self, namespace: str, name: str) -> Manifest | None:
            loop.enqueue(GOOD)
            return await super().read_claim(namespace, name)

        async def read_config(self, key: JobKey) -> Mapping[str, str] | None:
            loop.enqueue(GOOD)
            return await super().read_config(key)

    loop = make_loop(cluster := Changing(GOOD))
    await loop.reconcile(GOOD)

    assert await pods_read_by(cluster, loop, 3) == 3


async def test_a_job_that_is_not_admitted_is_read_again_each_time() -> None:
    class Unclaimed(MemoryCluster):
        async def read_claim(self, namespace: str, name: str) -> Manifest | None:
            return None

    loop = make_loop(cluster := Unclaimed(GOOD))

    assert await pods_read_by(cluster, loop, 3) == 3
    assert cluster.verdict(GOOD, Condition.ACCEPTED)[0] == Reason.STORAGE_MISSING


async def test_a_resync_reads_everything_again() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD), idle_interval=0.2)
    await loop.reconcile(GOOD)
    await loop.reconcile(GOOD)
    before = cluster.calls.count(("list_pods", GOOD))

    await run_for(loop, 0.7)

    assert cluster.calls.count(("list_pods", GOOD)) == before + 3


async def test_after_an_error_everything_is_read_again() -> None:
    loop = make_loop(cluster := MemoryCluster(GOOD))
    await loop.reconcile(GOOD)
    await loop.reconcile(GOOD)
    cluster.errors["read_job", GOOD] = ApiUnavailable("503")
    before = cluster.calls.count(("list_pods", GOOD))
    loop._queue.add(GOOD)
    asyncio.get_running_loop().call_later(0.5, cluster.errors.clear)

    await run_for(loop, 1.5)

    assert cluster.calls.count(("list_pods", GOOD)) == before + 1


@pytest.mark.parametrize("watched", [("ns",), ()])
async def test_a_job_of_a_namespace_that_cannot_be_read_is_left(watched: tuple[str, ...]) -> None:
    """With a list of namespaces, one of them may be deleted, with the operator's Role in it."""
    loop = make_loop(cluster := MemoryCluster(GOOD), watch_namespaces=watched)
    await loop.reconcile(GOOD)
    assert len(loop.job_states()) == 1
    cluster.errors["read_job", GOOD] = ApiRefused("403 forbidden")

    if not watched:
        with pytest.raises(ApiRefused):
            await loop.reconcile(GOOD)
        return
    assert await loop.reconcile(GOOD) == "left"

    assert len(loop.job_states()) == 0
    del cluster.errors["read_job", GOOD]
    assert await loop.reconcile(GOOD) == "ok"
