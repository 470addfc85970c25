"""What a namespace never allows leaves a running job its layout, on the real API server: quotas, limits, classes.

The pods are on nodes that exist only in the API server, and the bench's server replaces Ray's dashboard.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.integration.operator.test_placement import fake_head, fake_pool

# One module at a time has the dashboards.
pytestmark = [pytest.mark.usefixtures("volumes", "claim", "dashboards"), pytest.mark.timeout(2400)]

BIG = {"cpu": "10m", "memory": "100Gi", "shm": "8Mi"}
CLASS = {"podTemplate": {"spec": {"priorityClassName": "is-not-there"}}}


@contextmanager
def limited(kubectl: Any, kind: str, spec: dict[str, Any]) -> Iterator[None]:
    """Let the namespace have a limit for a while."""
    metadata = {"name": "team", "namespace": kubectl.namespace}
    assert kubectl.apply({"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec}).returncode == 0
    if kind == "ResourceQuota":
        kubectl("wait", "--for=jsonpath={.status.hard}", "resourcequota/team", "--timeout=240s")
    try:
        yield
    finally:
        kubectl("delete", kind, "team")


def is_limit_known(kubectl: Any) -> bool:
    """Return whether the API server refuses a pod with the memory of `BIG`: it knows a new limit with a delay."""
    resources = {kind: {"memory": BIG["memory"]} for kind in ("requests", "limits")}
    container = {"name": "main", "image": "nothing:1", "resources": resources}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": {"containers": [container]}}
    said = kubectl.run("create", "--dry-run=server", "--filename=-", stdin=json.dumps(pod)).stderr
    return "exceeded quota: team" in said or "maximum memory usage per Container" in said


class Running:
    """A job with a trainer, whose second pool is edited."""

    def __init__(self, kubectl: Any, jobs: Any, fake_nodes: Any, grace_period: int) -> None:
        self._kubectl, self.jobs = kubectl, jobs
        self._pools = [
            fake_pool(fake_nodes, name, kind, gpusPerNode=1) for name, kind in (("actor", "h200"), ("critic", "a100"))
        ]
        policy = {"stopGracePeriodSeconds": grace_period}
        self.name = jobs.create(device="CUDA", pools=self._pools, head=fake_head(fake_nodes), runPolicy=policy)
        jobs.wait_for(self.name, Condition.SUBMITTED, "True", Reason.TRAINER_SUBMITTED)
        self.cluster = self.status["rayCluster"]["name"]

    @property
    def status(self) -> dict[str, Any]:
        """Its status."""
        found: dict[str, Any] = self.jobs.status(self.name)
        return found

    def edit(self, **fields: Any) -> None:
        """Change its second pool."""
        change = json.dumps({"spec": {"pools": [self._pools[0], {**self._pools[1], **fields}]}})
        done = self._kubectl.run("patch", "ppojob", self.name, "--type=merge", f"--patch={change}")
        assert done.returncode == 0, done.stderr

    def refused(self) -> str:
        """Wait until its layout is refused; return why."""
        message: str = self.jobs.wait_for(self.name, Condition.LAYOUT_APPLIED, "False", Reason.INVALID_SPEC)
        return message


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("ResourceQuota", {"hard": {"limits.memory": "64Gi"}}, "1 pod requests limits.memory=100Gi, and quota team"),
        (
            "LimitRange",
            {"limits": [{"type": "Container", "max": {"memory": "64Gi"}}]},
            "maximum memory usage per Container is 64Gi, but limit is 100Gi",
        ),
    ],
)
def test_more_than_the_namespace_ever_allows_is_named_with_its_field(
    kubectl: Any, jobs: Any, fake_nodes: Any, kind: str, spec: dict[str, Any], words: str
) -> None:
    job = Running(kubectl, jobs, fake_nodes, grace_period=1)

    with limited(kubectl, kind, spec):
        jobs.wait_until(lambda: is_limit_known(kubectl))
        job.edit(resourcesPerGPU=BIG)
        message = job.refused()

    assert f"spec.pools[1].resourcesPerGPU.memory: {words}" in message
    assert "stop" not in job.status
    assert job.status["rayCluster"]["name"] == job.cluster


def test_a_quota_that_the_stop_frees_refuses_nothing(kubectl: Any, jobs: Any, fake_nodes: Any) -> None:
    job = Running(kubectl, jobs, fake_nodes, grace_period=1)
    pods = kubectl.json("get", "pods", "--selector", f"ppojob.dev/job={job.name}")["items"]

    with limited(kubectl, "ResourceQuota", {"hard": {"pods": str(len(pods))}}):
        job.edit(nodeSelector={"zone": "a"})
        jobs.wait(job.name, lambda status: status["rayCluster"]["name"] != job.cluster if "rayCluster" in status else 0)


def test_a_new_job_of_which_a_pod_can_never_run_says_so(kubectl: Any, jobs: Any, fake_nodes: Any) -> None:
    pools = [fake_pool(fake_nodes, "actor", "h200", gpusPerNode=1, resourcesPerGPU=BIG)]

    with limited(kubectl, "ResourceQuota", {"hard": {"limits.memory": "64Gi"}}):
        jobs.wait_until(lambda: is_limit_known(kubectl))
        name = jobs.create(device="CUDA", pools=pools, placement={"actor": "actor"}, head=fake_head(fake_nodes))
        message = jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.PODS_REFUSED)

    assert message.startswith("the pods can never run: spec.pools[0].resourcesPerGPU.memory: 1 pod requests limits.mem")
    assert "or raise the quota" in message


def test_a_second_edit_during_the_stop_is_tried_too(kubectl: Any, jobs: Any, fake_nodes: Any) -> None:
    # The second edit comes within the grace period, on a slow machine too.
    job = Running(kubectl, jobs, fake_nodes, grace_period=90)
    job.edit(nodeSelector={"zone": "a"})
    jobs.wait_for(job.name, Condition.LAYOUT_APPLIED, "False", Reason.REALLOCATING)

    job.edit(**CLASS)

    assert "no PriorityClass with name is-not-there" in job.refused()
    jobs.wait(job.name, lambda status: status["attempt"] == 1 and status.get("rayCluster", {}).get("name"), 300)
    [cluster] = [
        each
        for each in kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={job.name}")["items"]
        if each["metadata"]["name"] == job.status["rayCluster"]["name"]
    ]
    assert all("priorityClassName" not in group["template"]["spec"] for group in cluster["spec"]["workerGroupSpecs"])
