"""KWOK: nodes that exist only in the API server, with labels and GPUs, for tests of placement and of scale.

They carry a taint, so that no other pod strays there. Called by the command `kwok` and by tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.cluster.addresses import FAKE_POD_CIDR
from tools.cluster.binaries import assets
from tools.cluster.kubernetes import apply, get_json, kubectl
from tools.cluster.layout import Layout
from tools.cluster.locks import held
from tools.cluster.node import GPU_RESOURCE
from tools.cluster.processes import Processes
from tools.cluster.waiting import wait_until

PROCESS = "kwok"
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
TOLERATION = {"key": TAINT["key"], "operator": "Equal", "value": TAINT["value"], "effect": TAINT["effect"]}
FAKE_LABEL = "ppojob.dev/fake-node"
_START_LIMIT_SECONDS = 120.0
_PODS_PER_NODE = "500"


def ensure_running(layout: Layout, processes: Processes) -> None:
    """Start KWOK unless it runs; tests in several processes may ask for it at the same time."""
    with held(layout.state / "kwok.lock", limit=_START_LIMIT_SECONDS):
        if processes.is_running(PROCESS):
            return
        command: list[str | Path] = [
            layout.bin / "kwok",
            f"--kubeconfig={layout.config}/kwok.kubeconfig",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            f"--config={_stages(layout)}",
            f"--cidr={FAKE_POD_CIDR}",
        ]
        processes.start(PROCESS, command)


def add_nodes(
    layout: Layout,
    count: int,
    *,
    prefix: str = "fake",
    labels: Mapping[str, str] | None = None,
    gpus: int = 8,
    resource: str = GPU_RESOURCE,
) -> list[str]:
    """Create `count` ready nodes PREFIX-0 ... with `gpus` GPUs each; return their names.

    Raises:
        ClusterError: they are not ready after four minutes.
    """
    ensure_running(layout, Processes(layout))
    names = [f"{prefix}-{index}" for index in range(count)]
    apply(layout, *(_node(name, dict(labels or {}), gpus, resource) for name in names))

    def missing() -> str:
        nodes = get_json(layout, "nodes", f"--selector={FAKE_LABEL}={prefix}")["items"]
        left = sorted(set(names) - {node["metadata"]["name"] for node in nodes if _is_ready(node)})
        return f"{len(left)} nodes, such as {left[0]}" if left else ""

    wait_until("KWOK's nodes", missing, limit=240, interval=0.5, log=layout.log(PROCESS))
    return names


def remove_nodes(layout: Layout, *, prefix: str = "fake") -> None:
    """Delete the nodes of this prefix."""
    kubectl(layout, "delete", "nodes", f"--selector={FAKE_LABEL}={prefix}", "--ignore-not-found", limit=120)


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _stages(layout: Layout) -> Path:
    texts = [path.read_text().strip() for path in sorted((assets(layout, "kwok") / "stages").iterdir())]
    target = layout.config / "kwok-stages.yaml"
    target.write_text("\n---\n".join(texts) + "\n")
    return target


def _node(name: str, labels: dict[str, str], gpus: int, resource: str) -> dict[str, Any]:
    capacity = {"cpu": "64", "memory": "512Gi", "pods": _PODS_PER_NODE, resource: str(gpus)}
    own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {**own, FAKE_LABEL: name.rpartition("-")[0], "type": "kwok", **labels},
        },
        "spec": {"taints": [TAINT]},
        "status": {"allocatable": capacity, "capacity": capacity, "phase": "Running"},
    }
