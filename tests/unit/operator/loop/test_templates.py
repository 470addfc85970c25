"""The loop reads the template of a job until the job is accepted, and never again."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from ppojob_operator.plan import JobKey
from tests.bad_templates import JOB, TEMPLATE
from tests.unit.operator.loop.memory_cluster import GOOD, MemoryCluster, make_loop
from tests.unit.operator.virtual_time import now

pytestmark = pytest.mark.virtual_time
READ = ("read_template", JobKey(GOOD.namespace, "gpus"))
STORED = {**TEMPLATE, "metadata": {"name": "gpus", "uid": "t-1", "generation": 3}}


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("loop", "work_queue"):
        monkeypatch.setattr(f"ppojob_operator.{module}.monotonic", now)


@pytest.fixture
def cluster() -> MemoryCluster:
    cluster = MemoryCluster(GOOD)
    cluster.jobs[GOOD]["spec"] = JOB["spec"]
    return cluster


@pytest.mark.parametrize("kind", ["PPOJobTemplate", "ClusterPPOJobTemplate"])
async def test_a_job_begins_when_its_template_appears_and_reads_it_no_more(cluster: MemoryCluster, kind: str) -> None:
    loop = make_loop(cluster)
    cluster.jobs[GOOD]["spec"] = {**JOB["spec"], "templateRef": {"kind": kind, "name": "gpus"}}
    await loop.reconcile(GOOD)
    assert cluster.verdict(GOOD, Condition.TEMPLATE_RESOLVED)[0] == Reason.TEMPLATE_MISSING
    assert cluster.applied == []

    cluster.templates[kind, "gpus"] = STORED
    await loop.reconcile(GOOD)

    reason, message = cluster.verdict(GOOD, Condition.TEMPLATE_RESOLVED)
    assert reason == Reason.TEMPLATE_RESOLVED
    assert f"{kind} gpus, generation 3" in message
    assert cluster.applied == ["ServiceAccount", "Secret", "ConfigMap", "RayCluster"]
    assert '"image": "trainer:1"' in cluster.configs[GOOD]["job.json"]
    assert cluster.calls.count(READ) == 2

    del cluster.templates[kind, "gpus"]
    await loop.reconcile(GOOD)

    assert cluster.calls.count(READ) == 2
    assert cluster.verdict(GOOD, Condition.ACCEPTED)[0] == Reason.VALID


async def test_a_job_without_a_template_reads_none() -> None:
    cluster = MemoryCluster(GOOD)

    await make_loop(cluster).reconcile(GOOD)

    assert not [name for name, _ in cluster.calls if name == "read_template"]


async def test_the_template_of_another_operator_s_job_is_not_read(cluster: MemoryCluster) -> None:
    theirs: dict[str, Any] = {"namespace": "theirs", "lease": "ppojob-leader", "version": "1"}
    cluster.jobs[GOOD]["status"] = {"operator": theirs}
    cluster.read_lease = lambda namespace, name: _refused()  # type: ignore[attr-defined]

    assert await make_loop(cluster).reconcile(GOOD) == "left"

    assert READ not in cluster.calls


async def _refused() -> None:
    raise ApiRefused("403")


async def test_a_template_that_cannot_be_read_is_no_missing_one(cluster: MemoryCluster) -> None:
    cluster.errors[READ] = ApiUnavailable("503")

    with pytest.raises(ApiUnavailable):
        await make_loop(cluster).reconcile(GOOD)

    assert cluster.jobs[GOOD]["status"]["conditions"] == []
