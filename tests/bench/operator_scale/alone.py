"""KubeRay without the operator: the same RayClusters, made at once by the bench. The bench calls it.

What surrounds a RayCluster (ServiceAccount, ConfigMap, NetworkPolicy) is created, too. Nobody writes a PPOJob, none
exists, and no trainer is submitted. So the difference to the rate beside the operator is what the operator costs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ppojob_operator.plan import Claim, JobKey, Observed, Surroundings
from ppojob_operator.reading import read_job
from ppojob_operator.reconcile import decide
from tests.bench.operator_scale.connection import Connection
from tests.bench.operator_scale.fleet import Fleet, concurrently, manifest

_UID = "00000000-0000-4000-8000-000000000000"
_PATHS = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "RayCluster": "/apis/ray.io/v1/namespaces/{}/rayclusters",
}


async def ready_per_second(connection: Connection, namespace: str, count: int, num_pods: int, limit: float) -> float:
    """Create `count` RayClusters in an empty namespace; return how many a second became ready.

    The seconds are those from the first RayCluster that exists to the last that is ready, as beside the operator.

    Raises:
        RuntimeError: none was ready within the limit (seconds).
    """
    fleet = Fleet(connection, namespace, num_pods)
    async with fleet.watched():

        async def one(number: int) -> None:
            for made in objects(namespace, f"job-{number:04}", num_pods):
                await connection.call("POST", _PATHS[made["kind"]].format(namespace), made)

        await concurrently(one, range(count))
        await fleet.until(fleet.times.ready, count, limit)
    if not fleet.times.ready:
        raise RuntimeError(f"none of {count} RayClusters was ready after {limit:g} s")
    return len(fleet.times.ready) / (max(fleet.times.ready.values()) - min(fleet.times.applied.values()))


def objects(namespace: str, name: str, num_pods: int) -> list[dict[str, Any]]:
    """Return what the operator creates for a job of the fleet, without an owner: the RayCluster last."""
    raw = manifest(name, num_pods)
    raw["metadata"] |= {"namespace": namespace, "uid": _UID, "generation": 1}
    key = JobKey(namespace, name)
    observed = Observed(
        surroundings=Surroundings(report_url=f"https://operator/{key}", ca_bundle="none", dashboard_key=b"0" * 32),
        claim=Claim("any", "Bound"),
    )
    made = [dict(each) for each in decide(read_job(raw), observed, datetime.now(UTC)).apply]
    found = [each for each in made if each["kind"] in _PATHS]
    for each in found:
        # The garbage collector deletes what belongs to an owner that does not exist.
        each["metadata"] = {field: value for field, value in each["metadata"].items() if field != "ownerReferences"}
    return sorted(found, key=lambda each: list(_PATHS).index(each["kind"]))
