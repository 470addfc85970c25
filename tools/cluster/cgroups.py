"""The cluster's own control group. Its kubelet keeps the groups of all pods below it, so none has a shared name.

Called by `node`, `leftovers` and `preflight`. Works with control groups of version 1 (a hierarchy for each controller)
and 2 (a single one). A `kubepods` group elsewhere belongs to another kubelet, and nothing here changes it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tools.cluster.processes import start_ticks
from tools.cluster.waiting import wait_until

ROOT = Path("/sys/fs/cgroup")
NAME = "ppojob-cluster"
# What kubelets call the top of their pods' groups, with either driver.
_PODS = ("kubepods", "kubepods.slice")
# Files of versions 1 and 2 that freeze a group, and what each takes to thaw it.
_FREEZERS = {"freezer.state": "THAWED", "cgroup.freeze": "0"}


def ensure() -> None:
    """Create the group in every hierarchy: a kubelet refuses to start with a `cgroupRoot` that is missing."""
    for hierarchy in _hierarchies():
        available = hierarchy / "cgroup.controllers"
        for controller in available.read_text().split() if available.is_file() else ():
            # The kubelet says which one it misses, and some that it does not need cannot be enabled.
            with contextlib.suppress(OSError):
                (hierarchy / "cgroup.subtree_control").write_text(f"+{controller}")
        (hierarchy / NAME).mkdir(exist_ok=True)


def end_processes() -> int:
    """End every process in the group; return how many there were.

    Raises:
        ClusterError: some outlive SIGKILL for two minutes.
    """
    count = len(_processes(_own()))

    def remaining() -> str:
        _thaw(_own())
        # Again and again: a process may fork while it is being ended.
        left = _processes(_own())
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"{len(left)} processes in the control group {NAME}" if left else ""

    wait_until("the end of the containers' processes", remaining, limit=120)
    return count


def remove() -> int:
    """Remove the group with all groups below it; return how many there were.

    Raises:
        ClusterError: one of them cannot be removed.
    """
    count = len(_own())

    def remaining() -> str:
        _thaw(_own())
        for folder in _own():
            with contextlib.suppress(OSError):
                folder.rmdir()
        left = _own()
        return f"{len(left)} control groups, such as {left[0]}" if left else ""

    wait_until(f"the removal of the control group {NAME}", remaining, limit=120)
    return count


def processes_of_other_kubelets() -> set[int]:
    """The processes in the pods of kubelets that keep their groups at the top of a hierarchy, where ours does not."""
    tops = [hierarchy / name for hierarchy in _hierarchies() for name in _PODS]
    return _processes([folder for top in tops for folder in _below(top)])


def _hierarchies() -> list[Path]:
    if (ROOT / "cgroup.controllers").is_file():
        return [ROOT]
    # Links give several controllers of one hierarchy their names.
    return sorted({folder.resolve() for folder in ROOT.glob("*") if (folder / "cgroup.procs").is_file()})


def _own() -> list[Path]:
    """The group and all groups below it, in every hierarchy, the deepest first."""
    found = [folder for hierarchy in _hierarchies() for folder in _below(hierarchy / NAME)]
    return sorted(found, key=lambda folder: len(folder.parts), reverse=True)


def _below(top: Path) -> list[Path]:
    return [Path(folder) for folder, _, _ in os.walk(top)]


def _thaw(folders: list[Path]) -> None:
    """Let frozen processes end: a runtime that is killed while it ends a container leaves some."""
    frozen = [(folder / name, word) for folder in folders for name, word in _FREEZERS.items()]
    for file, thawed in frozen:
        if file.is_file():
            with contextlib.suppress(OSError):
                file.write_text(thawed)


def _processes(folders: list[Path]) -> set[int]:
    found: set[int] = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            found |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    return {pid for pid in found if start_ticks(pid) is not None}
