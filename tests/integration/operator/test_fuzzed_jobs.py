"""Whatever spec is created: the API server refuses it, or its conditions explain it within seconds; never an exception.

PPOJOB_FUZZ is the number of specs (`make fuzz`).
"""

import json
import os
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.fuzz.specs import specs

pytestmark = pytest.mark.usefixtures("volumes", "claim")

BATCH = 20
IS_LONG = "PPOJOB_FUZZ" in os.environ
NUM_BATCHES = max(1, int(os.environ.get("PPOJOB_FUZZ", "60")) // BATCH)
CONDITION_SECONDS = 60.0
"""From the creation of a batch until each job of it has a condition, also on a slow machine. The goal for one job is
10 s."""
RENDERED_SECONDS = 300.0
"""Until each accepted job has a RayCluster, or a condition that says why it has none."""
WAITING = {Reason.WAITING_FOR_PODS}


def test_every_job_is_refused_or_explained(kubectl: Any, operator: Any) -> None:
    num_stored = 0

    @settings(
        max_examples=NUM_BATCHES,
        deadline=None,
        database=None,
        # `make test` tries the same specs each time.
        derandomize=not IS_LONG,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(specs(), min_size=BATCH, max_size=BATCH))
    def run(batch: list[dict[str, Any]]) -> None:
        nonlocal num_stored
        num_stored += explained(kubectl, operator, batch)

    run()

    assert num_stored > 0
    print(f"{NUM_BATCHES * BATCH} specs: {num_stored} were stored, the others refused by the API server")


def explained(kubectl: Any, operator: Any, batch: list[dict[str, Any]]) -> int:
    """Create jobs and return how many the API server stores; fail if one of these is not explained."""
    metadata = [{"name": f"fuzz-{number}", "namespace": kubectl.namespace} for number in range(len(batch))]
    items = [
        {"apiVersion": "ppojob.dev/v1alpha1", "kind": "PPOJob", "metadata": each, "spec": spec}
        for each, spec in zip(metadata, batch, strict=True)
    ]
    # kubectl itself checks nothing, so that each job comes to the API server.
    kubectl.run("create", "--validate=ignore", "--filename=-", stdin="\n---\n".join(map(json.dumps, items)))
    stored = len(jobs_of(kubectl))
    wait(kubectl, operator, has_conditions, CONDITION_SECONDS)
    wait(kubectl, operator, is_settled, RENDERED_SECONDS)
    kubectl("delete", "ppojobs", "--all", "--wait=true", "--timeout=240s")
    return stored


def jobs_of(kubectl: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubectl.json("get", "ppojobs")["items"]
    return found


def jobs_with_clusters(kubectl: Any) -> list[tuple[dict[str, Any], int]]:
    """Return the jobs, each with the number of its RayClusters."""
    clusters = kubectl.json("get", "rayclusters")["items"]
    owners = [each["metadata"].get("labels", {}).get("ppojob.dev/job") for each in clusters]
    return [(job, owners.count(job["metadata"]["name"])) for job in jobs_of(kubectl)]


def wait(kubectl: Any, operator: Any, is_so: Any, limit: float) -> None:
    """Wait until something is so of every job; no exception may be in the operator's log."""
    end = time.monotonic() + limit
    while left := [job for job, owned in jobs_with_clusters(kubectl) if not is_so(job, owned)]:
        assert time.monotonic() < end, f"{is_so.__name__}: not after {limit:g} s: {json.dumps(left[0], indent=1)}"
        time.sleep(0.5)
    log = operator.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 2_000 :][:6_000]


def conditions_of(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["type"]: each for each in job.get("status", {}).get("conditions", [])}


def has_conditions(job: dict[str, Any], _: int) -> bool:
    accepted = conditions_of(job).get(Condition.ACCEPTED, {})
    return bool(accepted.get("message") and job["status"].get("phase"))


def is_settled(job: dict[str, Any], num_clusters: int) -> bool:
    """Whether a job has a RayCluster, or a condition that says why not."""
    conditions = conditions_of(job)
    if conditions[Condition.ACCEPTED]["status"] != "True":
        return True
    explaining = (Condition.SUSPENDED, Condition.FAILED, Condition.ADMITTED, Condition.SOURCES_FETCHED)
    if any(kind in conditions for kind in explaining):
        return True
    pools_ready = conditions.get(Condition.POOLS_READY)
    if pools_ready is not None and pools_ready["reason"] not in WAITING:
        return True
    return num_clusters > 0
