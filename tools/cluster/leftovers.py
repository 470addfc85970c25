"""Takes away what containers leave on the host when nobody tidies up: the second half of `down`, the first of `up`.

After a kill -9 of everything there remain: the containers' processes and shims, overlay and tmpfs mounts, network
namespaces, the bridge, hundreds of iptables rules, and control groups. Each is found by a mark that only this cluster
leaves (its control group, its socket, its folders, its CNI network's name) or by what `ownership` wrote down, and ended
or removed one by one. It refuses to guess: what is not marked stays, and is named.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from tools.cluster import cgroups, ownership, process_table
from tools.cluster.addresses import BRIDGE, CNI_NETWORK
from tools.cluster.command import run
from tools.cluster.errors import ClusterError
from tools.cluster.iptables import has_kubernetes_chains, remove_cluster_rules
from tools.cluster.layout import Layout
from tools.cluster.process_table import SHIM
from tools.cluster.processes import end, start_ticks

CNI_RESULTS = Path("/var/lib/cni/results")
MOUNTS = Path("/proc/self/mountinfo")
_FOREIGN_CHAINS = "left in place: KUBE- chains that were there before this cluster (a reboot removes them)"


def clear(layout: Layout) -> list[str]:
    """Remove every leftover and return what was found or left, in words. Call it when no process of the cluster runs.

    Raises:
        ClusterError: something outlives its removal.
    """
    owns_chains = ownership.owns_kubernetes_chains(layout)
    # The processes hold the mounts and namespaces, so they go first; a shim would restart nothing, but waits for them.
    counts = {
        "container processes": cgroups.end_processes(),
        "shims": _end_shims(layout),
        "mounts": _unmount(layout),
        "network namespaces": _remove_network_namespaces(),
        "bridge": _remove_bridge(),
        "iptables rules": remove_cluster_rules(with_kubernetes_chains=owns_chains),
        "control groups": cgroups.remove(),
        "device checkpoint": ownership.release_device_checkpoint(layout),
    }
    for folder in (layout.runtime, layout.kubelet, layout.claims):
        remove_tree(folder)
    found = [f"{count} {name}" for name, count in counts.items() if count]
    return [*found, _FOREIGN_CHAINS] if not owns_chains and has_kubernetes_chains() else found


def mounts_below(folders: list[Path]) -> list[Path]:
    """The mount points in or below the folders, the deepest first."""
    roots = [str(folder) for folder in folders]
    points = []
    for line in MOUNTS.read_text().splitlines():
        # Spaces and the like are written as octal escapes, of the name's bytes.
        point = line.split()[4].encode().decode("unicode_escape").encode("latin-1").decode()
        if any(point == root or point.startswith(f"{root}/") for root in roots):
            points.append(Path(point))
    return sorted(points, key=lambda point: len(point.parts), reverse=True)


def shims(layout: Layout) -> list[int]:
    """The process ids of the shims that belong to this cluster's containerd."""
    return [
        process.pid
        for process in process_table.running()
        if process.arguments[0].endswith(SHIM) and str(layout.containerd_socket) in process.arguments
    ]


def network_namespaces() -> list[Path]:
    """The network namespaces that the CNI's records name for our network."""
    records = CNI_RESULTS.glob(f"{CNI_NETWORK}-*")
    return sorted({path for record in records for path in _namespaces_of(record)})


def _end_shims(layout: Layout) -> int:
    found = shims(layout)
    for pid in found:
        ticks = start_ticks(pid)
        if ticks is not None:
            end(pid, ticks, limit=0.5)
    return len(found)


def _unmount(layout: Layout) -> int:
    points = mounts_below([layout.runtime, layout.kubelet, layout.containerd_root])
    for point in points:
        with contextlib.suppress(ClusterError):
            # Lazily: a dying process may hold the mount for another moment.
            run(["umount", "--lazy", point], limit=60)
    if left := mounts_below([layout.runtime, layout.kubelet, layout.containerd_root]):
        raise ClusterError(f"cannot unmount {left[0]} (and {len(left) - 1} more); see what holds it with fuser -m")
    return len(points)


def _remove_network_namespaces() -> int:
    recorded = set(network_namespaces())
    # The loopback plugin's records name no network of ours, but the same namespaces.
    for record in CNI_RESULTS.glob("*"):
        if recorded & _namespaces_of(record):
            record.unlink(missing_ok=True)
    existing = [path for path in recorded if path.exists()]
    for path in existing:
        with contextlib.suppress(ClusterError):
            run(["umount", "--lazy", path], limit=60)
        path.unlink(missing_ok=True)
    return len(existing)


def _namespaces_of(record: Path) -> set[Path]:
    with contextlib.suppress(OSError, ValueError, KeyError):
        interfaces = json.loads(record.read_text())["result"]["interfaces"]
        return {Path(interface["sandbox"]) for interface in interfaces if interface.get("sandbox")}
    return set()


def _remove_bridge() -> int:
    # Pods of one namespace end with it, and their veths too; a namespace still dying keeps its veth for a moment.
    for port in Path(f"/sys/class/net/{BRIDGE}/brif").glob("veth*"):
        with contextlib.suppress(ClusterError):
            run(["ip", "link", "delete", port.name], limit=60)
    if not Path(f"/sys/class/net/{BRIDGE}").exists():
        return 0
    run(["ip", "link", "delete", BRIDGE], limit=60)
    return 1


def remove_tree(folder: Path) -> None:
    """Remove the folder, if it is there and nothing is mounted in it.

    Raises:
        ClusterError: a mount or a file outlives the removal.
    """
    if mounts := mounts_below([folder]):
        raise ClusterError(f"{mounts[0]} is still mounted; not removing {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise ClusterError(f"cannot remove {folder}")
