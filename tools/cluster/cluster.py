"""Starts, stops and describes the whole cluster: the order of the parts is decided here, and only here.

`up` keeps a healthy cluster, restarts a satellite (registry, CoreDNS, KubeRay, kube-proxy) that has ended, and
otherwise clears everything away and starts with an empty etcd: half a cluster is never repaired.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tools.cluster import (
    binaries,
    certificates,
    control_plane,
    dns,
    kuberay,
    kwok,
    leftovers,
    network,
    node,
    preflight,
    registry,
    system_packages,
)
from tools.cluster.errors import ClusterError
from tools.cluster.images.pause import ensure_pause_image
from tools.cluster.layout import Layout
from tools.cluster.locks import held
from tools.cluster.processes import Processes
from tools.cluster.stages import Stages
from tools.cluster.waiting import wait_until

LOCK_LIMIT_SECONDS = 1200.0
HEALTH_LIMIT_SECONDS = 240.0
_PREFLIGHT = "look for another Kubernetes"
CORE = (*control_plane.PROCESSES, "containerd", "kubelet")
SATELLITES = ("kube-proxy", dns.PROCESS, kuberay.PROCESS, registry.PROCESS)
# What a process may need of what runs after it decides the order of the end: pods' owners first, stores last.
STOP_ORDER = (
    kwok.PROCESS,
    kuberay.PROCESS,
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    dns.PROCESS,
    "kube-apiserver",
    "etcd",
    "containerd",
    registry.PROCESS,
)


@contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """Hold the cluster's lock: one command at a time starts or stops things.

    Raises:
        ClusterError: the caller is not root, or another command holds the lock for too long.
    """
    if os.geteuid() != 0:
        raise ClusterError("the one-node cluster needs root (mounts, network, cgroups): run this with sudo")
    with held(layout.lock, limit=LOCK_LIMIT_SECONDS):
        yield


def is_healthy(layout: Layout) -> bool:
    """True if every process runs, the API server is ready and the node is too."""
    processes = Processes(layout)
    has_satellites = all(processes.is_running(name) for name in SATELLITES)
    return has_satellites and _has_healthy_core(layout, processes)


def build(layout: Layout, stages: Stages, names: Sequence[str] = ()) -> None:
    """Build every binary that is not built yet, or only those of the named modules."""
    known = {module.name: module for module in (*binaries.MODULES, *binaries.OPTIONAL)}
    if unknown := sorted(set(names) - set(known)):
        raise ClusterError(f"no module is called {unknown[0]!r}; there are: {', '.join(known)}")
    for module in [known[name] for name in names] or binaries.MODULES:
        with stages.stage(f"build {module.name}") as stage:
            stage.note = "built" if binaries.ensure(layout, module) else "built before"


def up(layout: Layout, stages: Stages) -> bool:
    """Make the cluster run; True if it was started, False if a healthy one was found.

    Raises:
        StageFailed: a stage failed, the first of them because another Kubernetes runs here; it has been reported.
    """
    with stages.stage(_PREFLIGHT):
        preflight.require_room(layout)
    with stages.stage("system packages") as stage:
        stage.note = ", ".join(system_packages.ensure()) or "all installed"
    build(layout, stages)
    processes = Processes(layout)
    was_running = _has_healthy_core(layout, processes)
    if not was_running:
        _start_core(layout, processes, stages)
    _start_satellites(layout, processes, stages)
    with stages.stage("node labels and GPU capacity") as stage:
        if not was_running:
            node.set_capacity(layout, node.DEFAULT_CAPACITY)
        node.set_labels(layout, node.DEFAULT_LABELS)
        stage.note = "kept" if was_running else f"{node.DEFAULT_CAPACITY[node.GPU_RESOURCE]} simulated GPUs"
    return not was_running


def down(layout: Layout, stages: Stages, *, purge: bool = False) -> None:
    """End every process and remove everything that the cluster left; with `purge`, the cached images too.

    Raises:
        StageFailed: a stage failed, the first of them because another Kubernetes runs here; it has been reported.
    """
    with stages.stage(_PREFLIGHT):
        preflight.require_no_other_kubernetes(layout)
    with stages.stage("end the processes") as stage:
        stage.note = ", ".join(_stop_all(layout, Processes(layout))) or "none ran"
    with stages.stage("remove what the containers left") as stage:
        stage.note = ", ".join(leftovers.clear(layout)) or "nothing"
    with stages.stage("remove the state folder"):
        for folder in (layout.image_runtime, layout.state):
            leftovers.remove_tree(folder)
    if purge:
        with stages.stage("remove the cached images"):
            for folder in (layout.containerd_root, layout.registry, layout.image_store):
                leftovers.remove_tree(folder)


def clear_away(layout: Layout, processes: Processes) -> list[str]:
    """End the cluster's processes and remove what would block a new cluster; return what was found.

    Raises:
        ClusterError: something cannot be removed.
    """
    stopped = _stop_all(layout, processes)
    found = leftovers.clear(layout)
    for folder in (layout.etcd, layout.logs):
        leftovers.remove_tree(folder)
    return [*stopped, *found]


def _has_healthy_core(layout: Layout, processes: Processes) -> bool:
    """True if the core runs and answers; a machine under load gets time, because the alternative is a restart."""

    def missing() -> str:
        if not all(processes.is_running(name) for name in CORE):
            return ""
        if not control_plane.is_ready(layout):
            return "the API server"
        return node.not_ready_reason(layout)

    try:
        wait_until("the cluster that runs already", missing, limit=HEALTH_LIMIT_SECONDS, interval=1)
    except ClusterError:
        return False
    return all(processes.is_running(name) for name in CORE)


def _start_core(layout: Layout, processes: Processes, stages: Stages) -> None:
    with stages.stage("remove an earlier cluster") as stage:
        stage.note = ", ".join(clear_away(layout, processes)) or "nothing to remove"
    with stages.stage("certificates") as stage:
        stage.note = "created" if certificates.ensure(layout) else "still valid"
    with stages.stage("network"):
        network.ensure(layout)
    with stages.stage("control plane"):
        control_plane.start(layout, processes)
    with stages.stage("registry and sandbox image") as stage:
        registry.ensure(layout, processes)
        pause_image = ensure_pause_image(layout)
        stage.note = pause_image
    with stages.stage("node"):
        node.start_containerd(layout, processes, pause_image=pause_image)
        node.start_kubelet(layout, processes)


def _start_satellites(layout: Layout, processes: Processes, stages: Stages) -> None:
    if not processes.is_running(registry.PROCESS):
        with stages.stage("registry"):
            registry.ensure(layout, processes)
    if not processes.is_running("kube-proxy"):
        with stages.stage("kube-proxy"):
            node.start_proxy(layout, processes)
    if not processes.is_running(dns.PROCESS):
        with stages.stage("CoreDNS"):
            dns.start(layout, processes)
    if not processes.is_running(kuberay.PROCESS):
        with stages.stage("KubeRay"):
            kuberay.install_crds(layout)
            kuberay.start(layout, processes)


def _stop_all(layout: Layout, processes: Processes) -> list[str]:
    others = [name for name in processes.recorded() if name not in STOP_ORDER]
    return [name for name in (*others, *STOP_ORDER) if processes.stop(name)]
