"""An object that the operator did not create is never taken over."""

from copy import deepcopy
from typing import Any

import pytest

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_operator.api_server import Answer, ApiRefused, ApiUnavailable
from ppojob_operator.cluster import Cluster
from ppojob_operator.manifests.config_map import config_map
from ppojob_operator.manifests.dashboard_secret import dashboard_secret
from ppojob_operator.manifests.fetch_job import fetch_job
from ppojob_operator.manifests.network_policy import network_policy
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.manifests.service_account import service_account
from ppojob_operator.plan import JobKey, JobNetwork
from tests.unit.operator.reconcile.worlds import spec

KEY = JobKey("rl-team", "arithmetic")
SPEC = resolve(parse_spec(spec()))
WANTED = config_map(KEY, "uid-1", "{}", "PEM")
QUEUED = ray_cluster(resolve(parse_spec(spec(runPolicy={"queueName": "gpus"}))), KEY, "uid-1", "arithmetic-job")
CHILDREN = [
    WANTED,
    service_account(KEY, "uid-1"),
    network_policy(SPEC, KEY, "uid-1", JobNetwork("ppojob-system", {})),
    ray_cluster(SPEC, KEY, "uid-1", "arithmetic-job"),
    fetch_job(SPEC, KEY, "uid-1"),
]
"""Only the Secret's name shows that it is ours: nobody else can know it in advance."""


class Server:
    """An API server with at most one object."""

    def __init__(self, found: dict[str, Any] | None) -> None:
        self.found = found
        self.patched: list[str] = []
        self.written: list[Any] = []
        self.status = 200

    async def read(self, collection: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self.found

    async def create(self, collection: str, manifest: Any) -> bool:
        self.written.append(manifest)
        return self.found is None

    async def call(self, method: str, path: str, namespace: str, name: str, *, body: Any, **_: Any) -> Answer:
        assert method == "PATCH"
        self.patched.append(name)
        self.written.append(body)
        return Answer(self.status, {})


def owned_by(*owners: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": "arithmetic-job", "ownerReferences": list(owners)}}


OTHER = {"kind": "PPOJob", "name": "arithmetic", "uid": "uid-0", "controller": True}
CHART = {"kind": "Deployment", "name": "web", "uid": "uid-9", "controller": True}


@pytest.mark.parametrize(
    ("found", "whose"),
    [
        (owned_by(), "belongs to nobody"),
        (owned_by(CHART), "belongs to Deployment web (uid uid-9)"),
        (owned_by({**OTHER, "name": "geometry"}), "belongs to PPOJob geometry (uid uid-0)"),
        (owned_by({**OTHER, "uid": "uid-1", "controller": False}), "belongs to PPOJob arithmetic (uid uid-1)"),
    ],
)
async def test_an_object_of_somebody_else_is_named_and_left_alone(found: dict[str, Any], whose: str) -> None:
    server = Server(found)

    with pytest.raises(ApiRefused, match="ConfigMap arithmetic-job exists") as raised:
        await Cluster(server, reporter="pod-1").apply(WANTED)  # type: ignore[arg-type]

    assert whose in str(raised.value)
    assert "give the PPOJob another name" in str(raised.value)
    assert server.patched == []


@pytest.mark.parametrize("manifest", CHILDREN, ids=lambda manifest: manifest["kind"])
async def test_every_kind_of_child_that_belongs_to_somebody_else_is_named(manifest: dict[str, Any]) -> None:
    found = {**owned_by(CHART), "spec": {}}
    found["metadata"]["name"] = name = manifest["metadata"]["name"]
    server = Server(found)

    words = f"{manifest['kind']} {name} exists and belongs to Deployment web"
    with pytest.raises(ApiRefused, match=words):
        await Cluster(server, reporter="pod-1").apply(manifest)  # type: ignore[arg-type]

    assert server.patched == []


async def test_a_secret_is_made_and_never_changed() -> None:
    server = Server(owned_by({**OTHER, "uid": "uid-1"}))
    secret = dashboard_secret(KEY, "uid-1", "arithmetic-1", "token")

    await Cluster(server, reporter="pod-1").apply(secret)  # type: ignore[arg-type]

    assert server.written == [secret]
    assert server.patched == []


async def test_a_cluster_in_a_queue_keeps_what_kueue_has_put_into_its_pods() -> None:
    live = {**owned_by({**OTHER, "uid": "uid-1"}), "spec": deepcopy(QUEUED["spec"])}
    live["metadata"]["resourceVersion"] = "42"
    live["spec"] |= {"suspend": False, "authOptions": {"mode": "disabled"}}
    template = live["spec"]["workerGroupSpecs"][0]["template"]
    template["metadata"]["annotations"] = {"kueue.x-k8s.io/workload": "w"}
    template["spec"]["nodeSelector"] = {"flavor": "h200"}
    template["spec"]["tolerations"].append({"key": "spot", "operator": "Exists"})
    template["spec"]["containers"][0]["image"] = "other:2"
    server = Server(live)

    await Cluster(server, reporter="pod-1").apply(QUEUED)  # type: ignore[arg-type]

    [written] = server.written
    template["spec"]["containers"][0]["image"] = "trainer:1"
    assert written["metadata"] == {**QUEUED["metadata"], "resourceVersion": "42"}
    assert written["spec"] == {**QUEUED["spec"], "workerGroupSpecs": live["spec"]["workerGroupSpecs"]}


async def test_a_cluster_in_the_default_queue_keeps_what_kueue_has_put_into_its_pods() -> None:
    wanted = deepcopy(QUEUED)
    del wanted["metadata"]["labels"][constants.LABEL_QUEUE]
    live = {**owned_by({**OTHER, "uid": "uid-1"}), "spec": deepcopy(wanted["spec"])}
    live["metadata"] |= {"resourceVersion": "42", "labels": {constants.LABEL_QUEUE: "default"}}
    live["spec"]["workerGroupSpecs"][0]["template"]["spec"]["nodeSelector"] = {"flavor": "h200"}
    server = Server(live)

    await Cluster(server, reporter="pod-1").apply(wanted)  # type: ignore[arg-type]

    [written] = server.written
    assert written["spec"]["workerGroupSpecs"] == live["spec"]["workerGroupSpecs"]
    assert written["metadata"]["resourceVersion"] == "42"
    assert constants.LABEL_QUEUE not in written["metadata"]["labels"], "the label stays Kueue's"


async def test_what_kueue_writes_meanwhile_is_waited_for() -> None:
    live = {**owned_by({**OTHER, "uid": "uid-1"}), "spec": QUEUED["spec"]}
    live["metadata"]["resourceVersion"] = "42"
    server = Server(live)
    server.status = 409

    with pytest.raises(ApiUnavailable, match="RayCluster arithmetic-job changed while it was being written"):
        await Cluster(server, reporter="pod-1").apply(QUEUED)  # type: ignore[arg-type]


async def test_what_an_earlier_job_of_the_name_has_left_is_waited_for() -> None:
    server = Server(owned_by(OTHER))

    with pytest.raises(ApiUnavailable, match="of an earlier PPOJob of this name is still being deleted"):
        await Cluster(server, reporter="pod-1").apply(WANTED)  # type: ignore[arg-type]

    assert server.patched == []


@pytest.mark.parametrize("found", [None, owned_by({**OTHER, "uid": "uid-1"})], ids=["absent", "ours"])
async def test_its_own_object_is_created_and_repaired(found: dict[str, Any] | None) -> None:
    server = Server(found)

    await Cluster(server, reporter="pod-1").apply(WANTED)  # type: ignore[arg-type]

    assert server.patched == ["arithmetic-job"]
