"""Whatever spec is created: the API server refuses it, or its conditions explain it within seconds; never an exception.

PPOJOB_FUZZ is the number of specs (`make fuzz`).
"""

import json
import math
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.fuzz.finds import FINDS
from tests.fuzz.specs import specs

pytestmark = pytest.mark.usefixtures("volumes", "claim")

BATCH = 20
IS_LONG = "PPOJOB_FUZZ" in os.environ
NUM_BATCHES = max(1, int(os.environ.get("PPOJOB_FUZZ", "60")) // BATCH)
CONDITION_SECONDS = 180.0
"""From the creation of a batch until each job of it has a condition, also on a slow machine."""
GOAL_SECONDS = 10.0
"""From the creation of a job to its first condition; it is printed and not asserted."""
WATCH_SECONDS, WATCH_LIMIT_SECONDS = 2.0, 30.0
NO_CONDITION = "<none>"
"""kubectl's word for an empty column."""
RENDERED_SECONDS = 300.0
"""Until each accepted job has a RayCluster, or a condition that says why it has none."""
WAITING = {Reason.WAITING_FOR_PODS}


def test_every_job_is_refused_or_explained(kubectl: Any, operator: Any) -> None:
    times: list[float] = []
    finds = [find.spec() for find in FINDS]
    for first in range(0, len(finds), BATCH):
        times += explained(kubectl, operator, finds[first : first + BATCH])

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
        times.extend(explained(kubectl, operator, batch))

    run()

    assert times
    num_specs = len(finds) + NUM_BATCHES * BATCH
    print(f"{num_specs} specs: {len(times)} were stored, the others refused by the API server")
    print(f"seconds from a job's creation to its first condition: {summary(times)}")


def summary(seconds: list[float]) -> str:
    """Return the median, the 99th percentile and the maximum, with the goal."""
    ordered = sorted(seconds)
    percentile = ordered[math.ceil(0.99 * len(ordered)) - 1]
    figures = {"median": statistics.median(ordered), "p99": percentile, "max": ordered[-1]}
    return ", ".join(f"{name} {value:.1f}" for name, value in figures.items()) + f" (goal: {GOAL_SECONDS:g})"


def explained(kubectl: Any, operator: Any, batch: list[dict[str, Any]]) -> list[float]:
    """Create jobs; fail if one that the API server stores is not explained.

    Returns:
        the seconds from the creation of each stored job to its first condition, if the watch has reported it.
    """
    metadata = [{"name": f"fuzz-{number}", "namespace": kubectl.namespace} for number in range(len(batch))]
    items = [
        {"apiVersion": "ppojob.dev/v1alpha1", "kind": "PPOJob", "metadata": each, "spec": spec}
        for each, spec in zip(metadata, batch, strict=True)
    ]
    # kubectl itself checks nothing, so that each job comes to the API server.
    with first_conditions(kubectl) as seen:
        kubectl.run("create", "--validate=ignore", "--filename=-", stdin="\n---\n".join(map(json.dumps, items)))
        stored = [job["metadata"]["name"] for job in jobs_of(kubectl)]
        wait(kubectl, operator, has_conditions, CONDITION_SECONDS)
        wait(kubectl, operator, is_settled, RENDERED_SECONDS)
        until_reported(seen, stored)
    kubectl("delete", "ppojobs", "--all", "--wait=true", "--timeout=240s")
    return [seen[name] for name in stored if name in seen]


@contextmanager
def first_conditions(kubectl: Any) -> Iterator[dict[str, float]]:
    """Watch jobs; yield the seconds from the creation of each to its first condition, by name.

    Both moments are those at which the watch reports them: times of the API server have whole seconds only.
    """
    created: dict[str, float] = {}
    seen: dict[str, float] = {}
    columns = "NAME:.metadata.name,CONDITION:.status.conditions[*].type"
    command = ["kubectl", "--namespace", kubectl.namespace, "get", "ppojobs", "--watch", "--no-headers"]

    def read(lines: IO[str]) -> None:
        for line in lines:
            now, (name, _, conditions) = time.monotonic(), line.partition(" ")
            began = created.setdefault(name, now)
            if conditions.strip() not in ("", NO_CONDITION):
                seen.setdefault(name, now - began)

    with subprocess.Popen([*command, f"--output=custom-columns={columns}"], stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        reader = threading.Thread(target=read, args=(watch.stdout,))
        reader.start()
        # Until it watches.
        time.sleep(WATCH_SECONDS)
        try:
            yield seen
        finally:
            watch.terminate()
            reader.join()


def until_reported(seen: dict[str, float], names: list[str]) -> None:
    """Wait until the watch has reported a condition of each job, for some time: a watch may end before."""
    end = time.monotonic() + WATCH_LIMIT_SECONDS
    while not seen.keys() >= set(names) and time.monotonic() < end:
        time.sleep(0.1)


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
