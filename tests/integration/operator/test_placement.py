"""Pools land on the nodes that they ask for, and what cannot land says so in the scheduler's words."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason

pytestmark = pytest.mark.usefixtures("volumes", "claim")

SMALL = {"cpu": "10m", "memory": "10Mi", "shm": "1Mi"}


def fake_pool(fakes: Any, name: str, kind: str, **fields: Any) -> dict[str, Any]:
    """Return a pool on fake nodes of a kind."""
    return {
        "name": name,
        "nodeSelector": fakes.kind(kind),
        "tolerations": list(fakes.tolerations),
        "resourcesPerGPU": SMALL,
        **fields,
    }


def fake_head(nodes: Any) -> dict[str, Any]:
    """Return a head on fake nodes."""
    return {
        "nodeSelector": nodes.kind("a100"),
        "tolerations": list(nodes.tolerations),
        "resources": {"cpu": "10m", "memory": "10Mi"},
    }


def test_two_pools_land_on_their_own_kinds_of_node(kubectl: Any, jobs: Any, fake_nodes: Any) -> None:
    pools = [
        fake_pool(fake_nodes, "actor", "h200", nodes=2, gpusPerNode=4, spread="Required"),
        fake_pool(fake_nodes, "critic", "a100", gpusPerNode=2),
    ]
    name = jobs.create(device="CUDA", pools=pools, head=fake_head(fake_nodes))

    jobs.wait_for(name, Condition.POOLS_READY, "True", Reason.PODS_READY)
    status = jobs.status(name)
    pods = kubectl.json("get", "pods", "--selector", f"ppojob.dev/job={name}")["items"]

    where = {
        pool: sorted(
            pod["spec"]["nodeName"] for pod in pods if pod["metadata"]["labels"].get("ppojob.dev/pool") == pool
        )
        for pool in ("actor", "critic")
    }
    assert where["actor"] == [f"{fake_nodes.prefix}-h200-0", f"{fake_nodes.prefix}-h200-1"]
    assert len(where["critic"]) == 1
    assert where["critic"][0].startswith(f"{fake_nodes.prefix}-a100-")
    assert status["ready"] == "10/10"
    assert [(pool["name"], pool["readyNodes"], pool["gpus"]) for pool in status["pools"]] == [
        ("actor", 2, 8),
        ("critic", 1, 2),
    ]
    # No Ray runs on a fake node, so the job goes no further, and says why.
    message = jobs.wait_for(name, Condition.SUBMITTED, "False", Reason.NOT_SUBMITTED)
    assert "Ray's dashboard" in message


def test_two_pools_share_the_hosts_and_each_has_a_pod_on_both(kubectl: Any, jobs: Any, fake_nodes: Any) -> None:
    """The placement of examples/07-shared-hosts, at half its size: each host has half its GPUs for each pool."""
    pools = [
        fake_pool(fake_nodes, name, "h200", nodes=2, gpusPerNode=2, spread="Required") for name in ("actor", "critic")
    ]
    name = jobs.create(device="CUDA", pools=pools, head=fake_head(fake_nodes))

    jobs.wait_for(name, Condition.POOLS_READY, "True", Reason.PODS_READY)
    pods = kubectl.json("get", "pods", "--selector", f"ppojob.dev/job={name}")["items"]

    hosts = [f"{fake_nodes.prefix}-h200-0", f"{fake_nodes.prefix}-h200-1"]
    for pool in ("actor", "critic"):
        own = [pod for pod in pods if pod["metadata"]["labels"].get("ppojob.dev/pool") == pool]
        assert sorted(pod["spec"]["nodeName"] for pod in own) == hosts
    assert jobs.status(name)["ready"] == "8/8"


def test_more_gpus_than_any_node_has_is_said_in_the_schedulers_words(jobs: Any, fake_nodes: Any) -> None:
    pools = [
        fake_pool(fake_nodes, "actor", "h200", gpusPerNode=4),
        fake_pool(fake_nodes, "critic", "a100", gpusPerNode=8),
    ]
    name = jobs.create(device="CUDA", pools=pools, head=fake_head(fake_nodes))

    # Until then, the actor's pod may wait for GPUs of the job before. The number of nodes changes with other tests.
    status = jobs.wait(name, lambda status: status.get("ready") == "4/12" and "message" in status["pools"][1])
    message = status["pools"][1]["message"]

    assert message.startswith("pool critic requests 8 nvidia.com/gpu per node; 0/")
    assert "Insufficient nvidia.com/gpu" in message
    [pools_ready] = [each for each in status["conditions"] if each["type"] == Condition.POOLS_READY]
    assert (pools_ready["status"], pools_ready["reason"]) == ("False", Reason.INSUFFICIENT_GPUS)
    assert pools_ready["message"] == message


def test_the_plugin_explains_each_pool_in_the_schedulers_words(
    kubectl: Any, jobs: Any, fake_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # kubectl finds its plugins on PATH.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    pools = [
        fake_pool(fake_nodes, "actor", "h200", gpusPerNode=4),
        fake_pool(fake_nodes, "critic", "a100", gpusPerNode=8),
    ]
    name = jobs.create(device="CUDA", pools=pools, head=fake_head(fake_nodes))
    jobs.wait(name, lambda status: status.get("ready") == "4/12" and bool(status["pools"][1].get("message")))

    def ppo(*arguments: str) -> str:
        command = ["kubectl", "ppo", *arguments, "--namespace", kubectl.namespace]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout

    lines = ppo("explain-pending", name)

    assert "pool actor: 1 of 1 pods ready, 1 created" in lines
    _, _, critic = lines.partition("pool critic: 0 of 1 pods ready, 1 created\n")
    assert critic.startswith("  scheduler: 0/")
    assert "Insufficient nvidia.com/gpu" in critic
    assert "4/12" in ppo("status")


def test_a_kind_of_node_that_is_not_there_is_said(jobs: Any, fake_nodes: Any) -> None:
    pools = [fake_pool(fake_nodes, "actor", "b300", gpusPerNode=1)]
    name = jobs.create(device="CUDA", pools=pools, placement={"actor": "actor"}, head=fake_head(fake_nodes))

    message = jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.UNSCHEDULABLE)

    assert f"on nodes with gpu-type={fake_nodes.prefix}-b300; 0/" in message


def test_a_job_that_cannot_start_fails_at_its_deadline_and_gives_its_nodes_back(
    kubectl: Any, jobs: Any, fake_nodes: Any
) -> None:
    pools = [fake_pool(fake_nodes, "actor", "h200", gpusPerNode=64)]
    name = jobs.create(
        device="CUDA",
        pools=pools,
        placement={"actor": "actor"},
        head=fake_head(fake_nodes),
    )
    # The scheduler's words, which the failure repeats, come before the deadline, on a busy machine too.
    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.INSUFFICIENT_GPUS)
    patch = '--patch={"spec": {"runPolicy": {"startupDeadlineSeconds": 1}}}'
    kubectl("patch", "ppojob", name, "--type=merge", patch)

    message = jobs.wait_for(name, Condition.FAILED, "True", Reason.STARTUP_DEADLINE_EXCEEDED, limit=300)

    assert "within 1 s" in message
    assert "pool actor requests 64 nvidia.com/gpu per node" in message
    jobs.wait(name, lambda status: status["phase"] == "Failed")
    selector = ("--selector", f"ppojob.dev/job={name}")
    kubectl("wait", "--for=delete", "rayclusters,pods", *selector, "--timeout=240s")
    assert jobs.status(name)["lastFailure"]["reason"] == Reason.STARTUP_DEADLINE_EXCEEDED
