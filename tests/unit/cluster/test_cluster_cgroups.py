"""The control group distinguishes the pods of this cluster's kubelet from those of another one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.cluster import cgroups


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    return tmp_path


def make_hierarchies(root: Path, version: int) -> list[Path]:
    """The hierarchies of a machine, as files; version 1 has a link for a second controller of a hierarchy."""
    if version == 2:
        (root / "cgroup.controllers").write_text("cpu memory\n")
        (root / "cgroup.subtree_control").write_text("")
        return [root]
    for name in ("cpu", "memory"):
        (root / name).mkdir()
        (root / name / "cgroup.procs").write_text("")
    (root / "cpuacct").symlink_to(root / "cpu")
    return [root / "cpu", root / "memory"]


def add_group(folder: Path, *processes: int) -> None:
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in processes))


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_is_made_in_every_hierarchy_and_removed_with_those_below(root: Path, version: int) -> None:
    hierarchies = make_hierarchies(root, version)
    cgroups.ensure()
    cgroups.ensure()
    for hierarchy in hierarchies:
        (hierarchy / cgroups.NAME / "kubepods" / "burstable").mkdir(parents=True)
        (hierarchy / "kubepods").mkdir()

    assert cgroups.remove() == 3 * len(hierarchies)

    assert [(hierarchy / cgroups.NAME).exists() for hierarchy in hierarchies] == [False] * len(hierarchies)
    assert all((hierarchy / "kubepods").is_dir() for hierarchy in hierarchies)
    assert cgroups.remove() == 0


def test_version_2_passes_its_controllers_on(root: Path) -> None:
    make_hierarchies(root, 2)
    cgroups.ensure()
    # The kernel takes one after the other; a file keeps the last.
    assert (root / "cgroup.subtree_control").read_text() == "+memory"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("top", ["kubepods", "kubepods.slice"])
def test_pods_at_the_top_of_a_hierarchy_are_another_kubelets(root: Path, version: int, top: str) -> None:
    last = make_hierarchies(root, version)[-1]
    add_group(last / cgroups.NAME / "kubepods" / "pod1", os.getppid())
    assert cgroups.processes_of_other_kubelets() == set()

    add_group(last / top / "besteffort" / "pod2", os.getpid())
    assert cgroups.processes_of_other_kubelets() == {os.getpid()}


def test_a_group_whose_processes_have_ended_is_in_nobodys_way(root: Path) -> None:
    # No process has this id: it is above the kernel's limit.
    add_group(make_hierarchies(root, 2)[0] / "kubepods", 2**22 + 1)
    assert cgroups.processes_of_other_kubelets() == set()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


def test_processes_of_another_kubelets_pods_are_not_ended(root: Path, child: subprocess.Popen[bytes]) -> None:
    add_group(make_hierarchies(root, 2)[0] / "kubepods", child.pid)
    assert cgroups.end_processes() == 0
    assert child.poll() is None


def test_processes_of_the_groups_own_pods_are_ended(root: Path, child: subprocess.Popen[bytes]) -> None:
    add_group(make_hierarchies(root, 2)[0] / cgroups.NAME / "kubepods" / "pod1", child.pid)
    assert cgroups.end_processes() == 1
    assert child.wait(timeout=240) == -signal.SIGKILL


@pytest.mark.parametrize(("version", "name", "thawed"), [(1, "freezer.state", "THAWED"), (2, "cgroup.freeze", "0")])
def test_frozen_processes_are_thawed_so_that_they_can_end(root: Path, version: int, name: str, thawed: str) -> None:
    last = make_hierarchies(root, version)[-1]
    ours, others = last / cgroups.NAME / "kubepods" / "pod1", last / "kubepods"
    for folder in (ours, others):
        add_group(folder)
        (folder / name).write_text("frozen")

    assert cgroups.end_processes() == 0

    assert (ours / name).read_text() == thawed
    assert (others / name).read_text() == "frozen"
