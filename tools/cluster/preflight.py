"""Refuses to work beside another Kubernetes, before anything on the machine has changed.

Called first by `up` and `down`. Two kubelets on one machine end each other's pods, and two kube-proxies rewrite each
other's rules. A process belongs to another Kubernetes unless this cluster has a record of it. A Kubernetes in a
container (kind, k3d, minikube) has a separate network and separate control groups, so it does not conflict; nor does
a containerd without pods, such as Docker's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from tools.cluster import cgroups, process_table
from tools.cluster.addresses import KUBERNETES_PORTS, PORTS
from tools.cluster.errors import ClusterError
from tools.cluster.layout import Layout
from tools.cluster.process_table import SHIM, Running
from tools.cluster.processes import Processes

# The one-node cluster keeps its state below the home folder of the user who started it.
_STATE_FOLDER = "/ppojob/cluster/"
_OF_ANOTHER_USER = "make cluster-down, with the HOME that it was started with"
_COMPONENTS = {"kubelet", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "hyperkube"}
# Distributions in one program -> the command that makes it one, how to stop it. The same program is their kubectl.
_DISTRIBUTIONS = {
    "kubelite": ((), "microk8s stop"),
    "k3s": (("server", "agent"), "systemctl stop k3s, then k3s-killall.sh"),
    "rke2": (("server", "agent"), "rke2-killall.sh"),
    "k0s": (("controller", "worker"), "k0s stop"),
    "microshift": (("run",), "systemctl stop microshift"),
}


def require_no_other_kubernetes(layout: Layout) -> None:
    """Return if no other Kubernetes runs on this machine.

    Raises:
        ClusterError: one does; names its processes, and what to do.
    """
    _refuse(list(_other_kubernetes(layout)))


def require_room(layout: Layout) -> None:
    """Return if no other Kubernetes runs here and no other process has a port that this cluster needs.

    Raises:
        ClusterError: one does; names the processes, and what to do.
    """
    require_no_other_kubernetes(layout)
    for port, pid in process_table.listeners(PORTS).items():
        if pid not in _own(layout):
            raise ClusterError(
                f"port {port}, which {PORTS[port]} needs, is taken by {_named(pid)}, which this cluster did not start. "
                "Nothing has been changed. Stop that process, or free the port, then run this again"
            )


def _other_kubernetes(layout: Layout) -> Iterator[tuple[str, str]]:
    """What runs of another Kubernetes, and the command that stops it ("" if that is not known)."""
    own = _own(layout)
    for process in process_table.running():
        sign = _sign(process, layout)
        if sign is not None and process.pid not in own and process_table.shares_network(process.pid):
            yield f"{sign[0]} ({_named(process.pid)})", sign[1]
    for port, pid in process_table.listeners(KUBERNETES_PORTS).items():
        if pid not in own:
            yield f"{PORTS[port]} (port {port} belongs to {_named(pid)})", ""
    if pods := sorted(cgroups.processes_of_other_kubelets()):
        yield f"the pods of another kubelet ({len(pods)} processes, such as {_named(pods[0])})", ""


def _sign(process: Running, layout: Layout) -> tuple[str, str] | None:
    """Which part of a Kubernetes the process is, and how to stop it; None if it is none, or this cluster's shim."""
    program, *rest = (PurePath(word).name for word in process.words[:2])
    if program in _COMPONENTS:
        is_ours = any(_STATE_FOLDER in word for word in process.words)
        return program, _OF_ANOTHER_USER if is_ours else f"systemctl stop {program}"
    if program in _DISTRIBUTIONS:
        commands, remedy = _DISTRIBUTIONS[program]
        return (program, remedy) if not commands or set(rest) & set(commands) else None
    if program == SHIM and "k8s.io" in process.words and str(layout.containerd_socket) not in process.words:
        return "a containerd with pods", ""
    return None


def _refuse(found: list[tuple[str, str]]) -> None:
    if not found:
        return
    remedies = sorted({remedy for _, remedy in found if remedy})
    how = f" (for example: {'; '.join(remedies)})" if remedies else ""
    listed = "\n".join(f"  {what}" for what, _ in found)
    raise ClusterError(
        f"another Kubernetes runs on this machine, and this cluster would disturb it:\n{listed}\n"
        f"Nothing has been changed. Either stop it{how} and run this again, or run the demo on it: "
        "KUBECONFIG=... IMAGE=... OPERATOR_IMAGE=... make demo"
    )


def _own(layout: Layout) -> set[int]:
    processes = Processes(layout)
    records = [processes.record(name) for name in processes.recorded()]
    return {record.pid for record in records if record is not None and record.is_alive()}


def _named(pid: int | None) -> str:
    process = process_table.read(pid) if pid else None
    if process is None:
        return f"process {pid}" if pid else "a process that cannot be seen from here"
    return f"process {pid}: {process.shown}"
