"""The webhook's reads, against a fake API server in this process."""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from ppojob_operator.api_server import ApiRefused
from ppojob_operator.cluster_admission import AdmissionCluster
from ppojob_operator.reconcile.acceptance import Kind, Reference
from tests.unit.operator.fake_api_server import connected

CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/ours"
PATHS = {
    Kind.CLAIM: "/api/v1/namespaces/rl-team/persistentvolumeclaims/x",
    Kind.CONFIG_MAP: "/api/v1/namespaces/rl-team/configmaps/x",
    Kind.PRIORITY_CLASS: "/apis/scheduling.k8s.io/v1/priorityclasses/x",
    Kind.RUNTIME_CLASS: "/apis/node.k8s.io/v1/runtimeclasses/x",
    Kind.SERVICE_ACCOUNT: "/api/v1/namespaces/rl-team/serviceaccounts/x",
    Kind.LOCAL_QUEUE: "/apis/kueue.x-k8s.io/v1beta1/namespaces/rl-team/localqueues/x",
    Kind.WORKLOAD_PRIORITY_CLASS: "/apis/kueue.x-k8s.io/v1beta1/workloadpriorityclasses/x",
    Kind.TEMPLATE: "/apis/ppojob.dev/v1alpha1/namespaces/rl-team/ppojobtemplates/x",
    Kind.CLUSTER_TEMPLATE: "/apis/ppojob.dev/v1alpha1/clusterppojobtemplates/x",
}


class FakeAPIServer:
    """Plays an API server that has what is in `objects`, by path."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.seen: list[str] = []
        self.patched: list[tuple[dict[str, str], Any]] = []
        self.status = 200

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append(f"{request.method} {request.raw_path.partition('?')[0]}")
        if request.method == "PATCH":
            self.patched.append((dict(request.query), json.loads(await request.text())))
            return web.json_response({"message": "said"}, status=self.status)
        found = self.objects.get(request.path)
        return web.json_response(found or {"message": "not found"}, status=200 if found else 404)


@pytest.fixture
def server() -> FakeAPIServer:
    return FakeAPIServer()


@pytest.fixture
async def cluster(server: FakeAPIServer) -> AsyncIterator[AdmissionCluster]:
    async with connected(server.handle) as api:
        yield AdmissionCluster(api)


@pytest.mark.parametrize("kind", Kind)
async def test_every_kind_is_read_from_its_place(cluster: AdmissionCluster, server: FakeAPIServer, kind: Kind) -> None:
    reference = Reference(kind, "x", "spec.somewhere")

    assert await cluster.read_reference(reference, "rl-team") is None
    server.objects[PATHS[kind]] = {"metadata": {"name": "x"}}
    assert await cluster.read_reference(reference, "rl-team") == {"metadata": {"name": "x"}}
    assert server.seen[0] == server.seen[-1] == f"GET {PATHS[kind]}"


@pytest.mark.parametrize("kind", [Kind.LOCAL_QUEUE, Kind.WORKLOAD_PRIORITY_CLASS])
async def test_a_newer_kueue_has_its_objects_under_another_version(
    cluster: AdmissionCluster, server: FakeAPIServer, kind: Kind
) -> None:
    server.objects[PATHS[kind].replace("v1beta1", "v1beta2")] = {"metadata": {"name": "x"}}

    assert await cluster.read_reference(Reference(kind, "x", "spec.somewhere"), "rl-team") is not None


@pytest.mark.parametrize(("name", "namespace"), [("..", "rl-team"), ("x", ".."), ("", "rl-team"), ("a/b", "rl-team")])
async def test_a_name_that_no_object_can_have_is_not_asked_for(
    cluster: AdmissionCluster, server: FakeAPIServer, name: str, namespace: str
) -> None:
    assert await cluster.read_reference(Reference(Kind.CLAIM, name, "spec.somewhere"), namespace) is None
    assert server.seen == []


async def test_the_webhooks_of_a_configuration_and_whom_they_trust(
    cluster: AdmissionCluster, server: FakeAPIServer
) -> None:
    assert await cluster.read_webhooks("ours") is None
    trusted = {"name": "two.x.y", "clientConfig": {"caBundle": base64.b64encode(b"PEM").decode()}}
    server.objects[CONFIGURATION] = {"webhooks": [{"name": "one.x.y", "clientConfig": {}}, trusted]}

    assert await cluster.read_webhooks("ours") == {"one.x.y": "", "two.x.y": "PEM"}


async def test_only_the_bundle_is_written_and_by_our_field_manager(
    cluster: AdmissionCluster, server: FakeAPIServer
) -> None:
    await cluster.trust("ours", ["one.x.y"], "PEM")

    [(query, body)] = server.patched
    assert server.seen == [f"PATCH {CONFIGURATION}"]
    assert query == {"fieldManager": "ppojob-operator", "force": "true"}
    assert body == {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "ours"},
        "webhooks": [{"name": "one.x.y", "clientConfig": {"caBundle": base64.b64encode(b"PEM").decode()}}],
    }


async def test_a_refusal_has_the_api_servers_words(cluster: AdmissionCluster, server: FakeAPIServer) -> None:
    server.status = 403

    with pytest.raises(ApiRefused, match="403 said"):
        await cluster.trust("ours", ["one.x.y"], "PEM")
