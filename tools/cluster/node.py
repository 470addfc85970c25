"""The node: containerd, the kubelet and kube-proxy, and the node object's labels and GPU capacity. Called by `up`.

There is no GPU: the capacity is written into the node's status, so that the scheduler counts it like real ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tools.cluster import cgroups, ownership
from tools.cluster.addresses import ALL_PODS_CIDR, CLUSTER_DOMAIN, NODE_IP, NODE_NAME, REGISTRY, REGISTRY_PORT
from tools.cluster.command import run, succeeds
from tools.cluster.errors import ClusterError, tail
from tools.cluster.kubernetes import get_json, kubectl
from tools.cluster.layout import Layout
from tools.cluster.leftovers import remove_tree
from tools.cluster.processes import Processes
from tools.cluster.templates import render
from tools.cluster.waiting import wait_until

_CRI_NOT_READY = "server is not initialized yet"
"""containerd's answer to a kubelet that starts too early and then exits: its CRI is the last part to be up."""
PROCESSES = ("containerd", "kubelet", "kube-proxy")
READY_LIMIT_SECONDS = 240.0
CNI_PLUGINS = Path("/usr/lib/cni")
GPU_RESOURCE = "nvidia.com/gpu"
DEFAULT_CAPACITY: Mapping[str, str] = {GPU_RESOURCE: "8"}
# What a pool's nodeSelector can ask for; `gpu-type` is the label that the documentation's examples use.
DEFAULT_LABELS: Mapping[str, str] = {"ppojob.dev/pool-role": "any", "gpu-type": "simulated"}


def start_containerd(
    layout: Layout,
    processes: Processes,
    *,
    pause_image: str,
    cni_plugins: Path = CNI_PLUGINS,
    base_specification: Path | None = None,
) -> None:
    """Start containerd without containers: those that a killed cluster left in its store are removed first.

    A store that it cannot start with is emptied once. `base_specification`: what the runtime begins each container
    with; its own default if it is None.

    Raises:
        ClusterError: it does not answer in time.
    """
    layout.runtime.mkdir(parents=True, exist_ok=True)
    layout.containerd_root.mkdir(parents=True, exist_ok=True)
    config = render(
        layout,
        "containerd.toml",
        pause_image=pause_image,
        registry_host=REGISTRY,
        registry_port=REGISTRY_PORT,
        cni_plugins=cni_plugins,
        base_specification=base_specification or "",
    )
    try:
        _start_containerd(layout, processes, config)
    except ClusterError:
        # A machine that went down amid a write may leave a store that containerd cannot read; the registry has it all.
        processes.stop("containerd")
        remove_tree(layout.containerd_root)
        layout.containerd_root.mkdir(parents=True)
        _start_containerd(layout, processes, config)
    stale = ctr(layout, "containers", "list", "--quiet").split()
    if stale:
        ctr(layout, "containers", "delete", *stale, limit=120)
        # The CRI plugin reads its sandboxes once, at its start.
        processes.stop("containerd")
        _start_containerd(layout, processes, config)


def start_kubelet(layout: Layout, processes: Processes) -> None:
    """Start the kubelet and wait until the node is ready.

    Raises:
        ClusterError: the node is not ready in time.
    """
    ownership.claim(layout)
    cgroups.ensure()
    (layout.config / "resolv.conf").write_text("")
    config = render(layout, "kubelet.yaml", node_ip=NODE_IP, cluster_domain=CLUSTER_DOMAIN, cgroup=cgroups.NAME)
    command: list[str | Path] = [
        layout.bin / "kubelet",
        f"--config={config}",
        f"--kubeconfig={layout.config}/kubelet.kubeconfig",
        f"--hostname-override={NODE_NAME}",
        f"--root-dir={layout.kubelet}",
        f"--node-ip={NODE_IP}",
    ]
    processes.start("kubelet", command)

    def missing() -> str:
        processes.require_running("containerd")
        if not processes.is_running("kubelet") and _CRI_NOT_READY in tail(layout.log("kubelet"), lines=5):
            processes.start("kubelet", command)
        processes.require_running("kubelet")
        return not_ready_reason(layout)

    wait_until("the node", missing, limit=READY_LIMIT_SECONDS, interval=0.5, log=layout.log("kubelet"))


def start_proxy(layout: Layout, processes: Processes) -> None:
    """Start kube-proxy, which makes services' addresses work."""
    config = render(layout, "kube-proxy.yaml", node_name=NODE_NAME, node_ip=NODE_IP, all_pods_cidr=ALL_PODS_CIDR)
    processes.start("kube-proxy", [layout.bin / "kube-proxy", f"--config={config}"])


def not_ready_reason(layout: Layout, name: str = NODE_NAME) -> str:
    """Why the node is not ready (or the API server cannot say), "" if it is."""
    try:
        nodes = get_json(layout, "nodes", f"--field-selector=metadata.name={name}")["items"]
    except ClusterError as error:
        return str(error)
    if not nodes:
        return f"node {name} is not registered"
    conditions = {condition["type"]: condition for condition in nodes[0]["status"].get("conditions", [])}
    ready = conditions.get("Ready", {"status": "Unknown", "message": "no condition Ready yet"})
    return "" if ready["status"] == "True" else f"node {name}: {ready.get('message', '')}"


def set_capacity(layout: Layout, capacity: Mapping[str, str], name: str = NODE_NAME) -> None:
    """Make the scheduler count these resources on the node; the kubelet keeps them until it restarts.

    `capacity` is the whole list of extended resources that change, for example {"nvidia.com/gpu": "4"}.
    """
    # The kubelet derives allocatable from capacity at its next report; writing both spares the wait.
    patch = {"status": {"capacity": dict(capacity), "allocatable": dict(capacity)}}
    kubectl(layout, "patch", "node", name, "--subresource=status", "--type=merge", f"--patch={json.dumps(patch)}")


def set_labels(layout: Layout, labels: Mapping[str, str], name: str = NODE_NAME) -> None:
    """Label the node, replacing other values."""
    kubectl(layout, "label", "node", name, "--overwrite", *(f"{key}={value}" for key, value in labels.items()))


def ctr(layout: Layout, *arguments: str, limit: float = 60) -> str:
    """Run ctr in Kubernetes' namespace of the cluster's containerd."""
    return run(["ctr", f"--address={layout.containerd_socket}", "--namespace=k8s.io", *arguments], limit=limit)


def _start_containerd(layout: Layout, processes: Processes, config: Path) -> None:
    processes.start("containerd", ["containerd", f"--config={config}"])

    def missing() -> str:
        processes.require_running("containerd")
        command = ["ctr", f"--address={layout.containerd_socket}", "--namespace=k8s.io", "containers", "list", "-q"]
        return "" if succeeds(command, limit=15) else f"an answer on {layout.containerd_socket}"

    wait_until("containerd", missing, limit=240, log=layout.log("containerd"))
