"""The parts of the operator's bench: what they count, and that the fleet's jobs are good ones."""

import asyncio
import math
import os
import time
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from ppojob_api.v1alpha1.validation import parse_spec
from tests.bench.operator_scale.connection import samples
from tests.bench.operator_scale.dashboards import Dashboards
from tests.bench.operator_scale.figures import Meter, percentile, resident_mib
from tests.bench.operator_scale.fleet import Fleet, concurrently, manifest, ticks

METRICS = """# TYPE apiserver_request_total counter
apiserver_request_total{code="200",resource="ppojobs",verb="APPLY"} 12
apiserver_request_total{code="200",resource="pods",verb="LIST"} 3
# TYPE apiserver_request_total_more counter
apiserver_request_total_more 7
"""


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value


def test_of_no_values_there_is_no_percentile() -> None:
    assert math.isnan(percentile([], 0.5))


def test_a_familys_samples_are_distinguished_from_those_of_a_longer_name() -> None:
    found = {sample.labels["resource"]: sample.value for sample in samples(METRICS, "apiserver_request_total")}

    assert found == {"ppojobs": 12, "pods": 3}


def test_a_process_has_memory_and_uses_processor_time() -> None:
    meter = Meter({"me": os.getpid()})
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass

    assert meter.read().processor["me"] >= 0.03
    assert 1 < resident_mib(os.getpid()) <= resident_mib(os.getpid(), "VmHWM")


@pytest.mark.parametrize("num_pods", [3, 20])
def test_the_fleets_jobs_are_good_and_have_as_many_pods_as_were_asked_for(num_pods: int) -> None:
    spec = parse_spec(manifest("job-0001", num_pods)["spec"])

    assert 1 + sum(pool.nodes for pool in spec.pools) == num_pods


async def test_the_stub_answers_as_rays_dashboards_do() -> None:
    dashboards = Dashboards()
    async with TestClient(TestServer(dashboards.application())) as client:
        sent = {"submission_id": "ppojob-u-0", "entrypoint": "run", "metadata": {"pods": "x"}}
        assert (await client.post("/api/jobs/", json=sent)).status == 200
        (job,) = await (await client.get("/api/jobs/")).json()
        others = await (await client.get("/api/jobs/", headers={"Host": "10.250.0.9:8265"})).json()

    assert (job["submission_id"], job["status"], job["metadata"]) == ("ppojob-u-0", "RUNNING", {"pods": "x"})
    assert others == [], "each address has jobs of its own"
    assert dashboards.num_looks == 2


def fleet() -> Fleet:
    return Fleet(None, "ns", 3)  # type: ignore[arg-type]


def test_the_fleet_notes_when_something_happened_first() -> None:
    jobs = fleet()
    labels = {"ppojob.dev/job": "job-1", "ray.io/node-type": "head"}
    cluster: dict[str, Any] = {"metadata": {"labels": labels}, "status": {}}

    jobs._cluster("ADDED", cluster)
    applied = jobs.times.applied["job-1"]
    jobs._pod("ADDED", {"metadata": {"name": "head", "uid": "u", "labels": labels}})
    jobs._cluster("MODIFIED", {**cluster, "status": {"state": "ready"}})
    sent = [{"type": "Accepted", "status": "True"}, {"type": "Submitted", "status": "True"}]
    jobs._job("MODIFIED", {"metadata": {"name": "job-1"}, "status": {"conditions": sent, "progress": {"step": 1}}})

    times = jobs.times
    assert times.applied["job-1"] == applied
    assert applied <= times.pods["job-1"] <= times.ready["job-1"] <= times.running["job-1"]
    assert set(times.reported) == {"job-1"}
    assert jobs.heads == {"job-1": ("head", "u")}


async def test_waiting_for_the_fleet_ends_when_enough_of_it_is_there() -> None:
    assert await fleet().until({"a": 1.0, "b": 2.0}, 2, limit=5) == 2
    assert await fleet().until({"a": 1.0}, 2, limit=0.3) == 1


async def test_everything_is_done_once_and_some_of_it_at_the_same_time() -> None:
    done, in_work, most = [], 0, 0

    async def work(number: int) -> None:
        nonlocal in_work, most
        in_work += 1
        most = max(most, in_work)
        await asyncio.sleep(0.001)
        in_work -= 1
        done.append(number)

    await concurrently(work, range(40))

    assert sorted(done) == list(range(40))
    assert most == 16


async def test_ticks_come_at_their_rate_and_catch_up() -> None:
    began, numbers = time.monotonic(), []
    async for number in ticks(100, 0.2):
        numbers.append(number)
        await asyncio.sleep(0.05 if number == 0 else 0)

    assert numbers == list(range(20))
    assert time.monotonic() - began >= 0.19
