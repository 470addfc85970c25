"""In a namespace that is being deleted, the operator creates nothing, repeats nothing and writes no status."""

import pytest
from aiohttp import web

from ppojob_operator.api_server import ApiRefused, NamespaceTerminatingError
from ppojob_operator.cluster import Cluster
from ppojob_operator.manifests.config_map import config_map
from ppojob_operator.manifests.dashboard_secret import dashboard_secret
from ppojob_operator.plan import JobKey
from tests.unit.operator.fake_api_server import connected
from tests.unit.operator.loop.memory_cluster import GOOD, MemoryCluster, make_loop, run_for
from tests.unit.operator.virtual_time import now

WORDS = "unable to create new content in namespace ns because it is being terminated"
TERMINATING = {"reason": "NamespaceTerminating", "message": "namespace ns is being terminated", "field": "metadata"}
KEY = JobKey("ns", "good")


@pytest.mark.virtual_time
async def test_nothing_is_repeated_or_written(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("loop", "work_queue"):
        monkeypatch.setattr(f"ppojob_operator.{module}.monotonic", now)
    caplog.set_level("INFO")
    loop = make_loop(cluster := MemoryCluster(GOOD))
    await loop.reconcile(GOOD)
    cluster.clusters.clear()
    cluster.calls.clear()
    cluster.events.clear()
    cluster.errors["apply", GOOD] = NamespaceTerminatingError(f"403 {WORDS}")
    loop.enqueue(GOOD)

    await run_for(loop, 10)

    assert cluster.calls.count(("read_job", GOOD)) == cluster.calls.count(("apply", GOOD)) == 1
    assert ("write_status", GOOD) not in cluster.calls
    assert cluster.events == []
    assert f"ns/good: nothing is created for it any more: 403 {WORDS}" in caplog.text
    assert "retry in" not in caplog.text


@pytest.mark.parametrize(
    ("body", "is_terminating"),
    [
        ({"message": WORDS, "details": {"causes": [TERMINATING]}}, True),
        ({"message": WORDS, "details": {"causes": [{"reason": "FieldValueInvalid"}]}}, False),
        ({"message": "pods is forbidden", "details": {"name": "x"}}, False),
        ({"message": "forbidden"}, False),
    ],
)
@pytest.mark.parametrize("manifest", [dashboard_secret(KEY, "u", "c", "t"), config_map(KEY, "u", "{}", "PEM")])
async def test_the_api_servers_cause_says_it(
    body: dict[str, object], is_terminating: bool, manifest: dict[str, object]
) -> None:
    async def handle(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({}, status=404)
        return web.json_response(body, status=403)

    async with connected(handle) as api:
        with pytest.raises(ApiRefused) as raised:
            await Cluster(api, reporter="pod-1").apply(manifest)

    assert isinstance(raised.value, NamespaceTerminatingError) == is_terminating
