"""The role of the chart is the least that works: every right in it is used, and no call is refused."""

from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.template_reference import TemplateKind
from tests.integration.operator.conftest import render_chart
from tests.integration.operator.hiding_proxy import HidingProxy, Right

pytestmark = pytest.mark.usefixtures("volumes", "claim")

BY_APPLY = {
    Right("create", "ray.io", "rayclusters"),
    Right("create", "batch", "jobs"),
    Right("create", "networking.k8s.io", "networkpolicies"),
    Right("create", "", "configmaps"),
    Right("create", "", "serviceaccounts"),
}
"""Server-side apply takes `create` besides `patch` where the object is new."""
ELSEWHERE = {
    # tests/integration/status_server reports with the same account.
    Right("create", "authentication.k8s.io", "tokenreviews"),
    Right("get", "", "pods"),
    # test_fuzzed_edits: pods are tried before a running trainer is stopped.
    Right("create", "", "pods"),
    # test_lifecycle counts an Event that comes again.
    Right("get", "", "events"),
    Right("update", "", "events"),
}


@pytest.fixture(scope="module")
def proxy(rights: Any) -> Iterator[HidingProxy]:
    with rights.proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def operator(rights: Any, proxy: HidingProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    process = rights.operator_behind(proxy, tmp_path_factory.mktemp("operator"), PPOJOB_IDLE_INTERVAL="4")
    process.start()
    yield process
    assert process.stop() == 0, process.log.read_text()


def rights_of(chart: list[dict[str, Any]]) -> set[Right]:
    """Return what the roles of the chart allow."""
    return {
        Right(verb, group, resource)
        for manifest in chart
        for rule in manifest.get("rules", [])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_every_right_is_used_and_none_is_missing(kubectl: Any, jobs: Any, operator: Any, proxy: HidingProxy) -> None:
    name = jobs.create(runPolicy={"ttlSecondsAfterFinished": 1})
    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)
    kubectl("patch", "ppojob", name, "--type=merge", "-p", '{"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}}')
    kubectl("wait", "--for=delete", f"ppojob/{name}", "--timeout=240s")
    jobs.create(runPolicy={"queueName": "gpus"})
    fetched = jobs.create(model={"actor": {"path": "hf://acme/tiny"}})
    jobs.wait_for(fetched, Condition.SOURCES_FETCHED, "False", Reason.FETCHING)
    kubectl("patch", "ppojob", fetched, "--type=merge", "-p", '{"spec": {"runPolicy": {"suspend": true}}}')
    kubectl("wait", "--for=delete", f"job/{fetched}-fetch", "--timeout=240s")
    missing = [jobs.create(templateRef={"kind": kind.value, "name": "none"}) for kind in TemplateKind]
    for name in missing:
        jobs.wait_for(name, Condition.TEMPLATE_RESOLVED, "False", Reason.TEMPLATE_MISSING)
    for used in (Right("list", "ppojob.dev", "ppojobs"), Right("list", "kueue.x-k8s.io", "workloads")):
        jobs.wait_until(lambda used=used: used in proxy.used)

    allowed = rights_of(render_chart(kubectl.namespace))
    # Every authenticated client may read the discovery paths, which name no resource.
    asked = {right for right in proxy.used if not right.resource.startswith("/")}

    assert asked - allowed == set()
    assert allowed - asked - BY_APPLY - ELSEWHERE == set()
    assert "forbidden" not in operator.log.read_text()
