"""The loop and another operator's jobs: they are seen, and nothing else."""

import pytest

from ppojob_api.v1alpha1.constants import Reason
from ppojob_operator.plan import Manifest
from tests.unit.operator.loop.memory_cluster import BAD, GOOD, OURS, MemoryCluster, make_loop

pytestmark = pytest.mark.virtual_time


class SharedCluster(MemoryCluster):
    """Another operator lives there too."""

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        assert (namespace, name) == ("elsewhere", OURS.lease)
        return {"spec": {"holderIdentity": "pod_1", "leaseDurationSeconds": 15, "renewTime": "now"}}


async def test_of_a_job_of_another_operator_nothing_is_read_written_or_counted() -> None:
    loop = make_loop(cluster := SharedCluster(GOOD, BAD))
    for key in (GOOD, BAD):
        await loop.reconcile(key)
    cluster.jobs[BAD]["status"]["operator"] = {**OURS.to_wire(), "namespace": "elsewhere"}
    cluster.calls.clear()

    assert await loop.reconcile(BAD) == "left"

    assert cluster.calls == [("read_job", BAD)]
    assert cluster.events[-1] == Reason.OTHER_OPERATOR
    assert (loop.num_left_alone, [state.phase for state in loop.job_states().values()]) == (1, ["Starting"])
    del cluster.jobs[BAD]
    assert await loop.reconcile(BAD) == "gone"
    assert loop.num_left_alone == 0
