"""Starts the cluster from a pack: as `tools.cluster.cluster` does, without what needs iptables, a registry or a build.

Two of our programs replace others: `service_proxy` replaces kube-proxy, and `device_plugin` replaces NVIDIA's, which
would need its container runtime. Called by the commands here.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tools.cluster import certificates, cluster, control_plane, dns, kuberay, network, node, preflight
from tools.cluster.addresses import NODE_NAME
from tools.cluster.command import run, succeeds
from tools.cluster.errors import ClusterError
from tools.cluster.kubernetes import get_json
from tools.cluster.layout import Layout
from tools.cluster.offline import host_image
from tools.cluster.offline.device_plugin import RESOURCE, find_gpus
from tools.cluster.offline.machine import Machine
from tools.cluster.processes import Processes
from tools.cluster.stages import Stages
from tools.cluster.waiting import wait_until

DEVICE_PLUGIN = "device-plugin"
SERVICE_PROXY = "service-proxy"
_LOADER_LIST = Path("/etc/ld.so.conf.d/ppojob-cluster.conf")
_DRIVER_LIMIT_SECONDS = 90.0
_COMPILE_LIMIT_SECONDS = 120.0
# What makes the driver load its modules and make the device nodes.
_TOUCH_GPUS = "import torch; torch.zeros(1, device='cuda')"


def up(machine: Machine, stages: Stages) -> None:
    """Start the cluster, its images, and the GPUs' device plugin.

    Raises:
        StageFailed: a stage failed; it has been reported.
    """
    layout, processes = machine.layout, Processes(machine.layout)
    with stages.stage("look for another Kubernetes"):
        preflight.require_room(layout)
    with stages.stage("programs") as stage:
        stage.note = _install_programs(machine)
    with stages.stage("bytecode"):
        _compile(machine)
    with stages.stage("remove an earlier cluster"):
        cluster.clear_away(layout, processes)
    with stages.stage("certificates, network and images"):
        certificates.ensure(layout)
        network.ensure(layout, has_iptables=False)
        images = host_image.write_images(machine)
        specification = host_image.write_specification(machine)
    with stages.stage("control plane"):
        control_plane.start(layout, processes)
    with stages.stage("node"):
        node.start_containerd(
            layout,
            processes,
            pause_image=host_image.PAUSE_IMAGE,
            cni_plugins=machine.system / "cni",
            base_specification=specification,
        )
        for image in images:
            node.ctr(layout, "images", "import", str(image))
        node.start_kubelet(layout, processes)
    with stages.stage("services, CoreDNS and KubeRay"):
        processes.start(SERVICE_PROXY, [sys.executable, "-m", "tools.cluster.offline.service_proxy", machine.folder])
        dns.start(layout, processes, has_upstream=False)
        kuberay.install_crds(layout)
        kuberay.start(layout, processes)
    with stages.stage("GPUs") as stage:
        node.set_labels(layout, node.DEFAULT_LABELS)
        stage.note = f"{_offer_gpus(machine, processes)} offered by a device plugin"


def _install_programs(machine: Machine) -> str:
    """Give the loader those libraries of the packed programs that this machine does not have."""
    lacking = missing_libraries(machine.system / "lib", run(["/sbin/ldconfig", "-p"], limit=30))
    if lacking:
        folder = machine.system / "lacking"
        folder.mkdir(exist_ok=True)
        for library in lacking:
            shutil.copy2(library, folder)
        _LOADER_LIST.write_text(f"{folder}\n")
        run(["/sbin/ldconfig"], limit=60)
    return f"libraries added: {', '.join(path.name for path in lacking) or 'none'}"


def _compile(machine: Machine) -> None:
    """Compile what pods see but cannot write: every process there would compile it again."""
    folders = [*machine.sources[:1], machine.packages, *([machine.site] if machine.site else [])]
    # It fails for files that are meant for other versions of Python, which nobody imports.
    succeeds([sys.executable, "-m", "compileall", "-q", "-j", "0", *folders], limit=_COMPILE_LIMIT_SECONDS)


def missing_libraries(carried: Path, known: str) -> list[Path]:
    """The carried libraries whose names the loader's list `known` (of `ldconfig -p`) does not have."""
    names = {line.split()[0] for line in known.splitlines() if line.startswith("\t")}
    return sorted(path for path in carried.iterdir() if path.name not in names)


def _offer_gpus(machine: Machine, processes: Processes) -> int:
    if machine.devices == Path("/dev") and not (machine.devices / "nvidia-uvm").exists():
        # By another process, because a process that has used a GPU holds memory there.
        run([sys.executable, "-c", _TOUCH_GPUS], limit=_DRIVER_LIMIT_SECONDS)
    count = len(find_gpus(machine.devices))
    if not count:
        raise ClusterError(f"there is no GPU: no nvidia0, nvidia1, ... in {machine.devices}")
    command = [sys.executable, "-m", "tools.cluster.offline.device_plugin", f"--devices={machine.devices}"]
    processes.start(DEVICE_PLUGIN, command, environment={"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    layout = machine.layout

    def missing() -> str:
        processes.require_running(DEVICE_PLUGIN)
        return "" if _offered(layout) == count else f"{count} GPUs in the node's status, which has {_offered(layout)}"

    wait_until("the GPUs", missing, limit=60, interval=0.5, log=layout.log(DEVICE_PLUGIN))
    return count


def _offered(layout: Layout) -> int:
    return int(get_json(layout, "node", NODE_NAME)["status"].get("allocatable", {}).get(RESOURCE, 0))
