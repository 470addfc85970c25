"""What a killed cluster left is found by the marks that only it leaves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.cluster import cgroups, leftovers, ownership
from tools.cluster.errors import ClusterError
from tools.cluster.layout import Layout

MOUNTINFO = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:30 / /state/kubelet rw,relatime shared:1 - ext4 /dev/vda rw
31 30 0:31 / /state/kubelet/pods/a/volumes/token rw,relatime - tmpfs tmpfs rw
32 22 0:32 / /state/kubelet-of-another rw,relatime - tmpfs tmpfs rw
33 22 0:33 / /state/kubelet/pods/a\040b\303\244 rw,relatime - tmpfs tmpfs rw
34 22 0:34 / /run/ours/containerd/rootfs rw,relatime - overlay overlay rw
"""


@pytest.fixture(autouse=True)
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    monkeypatch.setattr(leftovers, "MOUNTS", tmp_path / "mountinfo")


def test_mounts_are_found_below_our_folders_only_the_deepest_first() -> None:
    found = leftovers.mounts_below([Path("/state/kubelet"), Path("/run/ours")])
    assert found[0] == Path("/state/kubelet/pods/a/volumes/token")
    assert found[-1] == Path("/state/kubelet")
    assert set(found[1:-1]) == {Path("/state/kubelet/pods/a bä"), Path("/run/ours/containerd/rootfs")}


def test_a_folder_with_a_mount_in_it_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kubelet"
    (folder / "volume").mkdir(parents=True)
    (tmp_path / "mountinfo").write_text(f"30 22 0:30 / {folder}/volume rw - tmpfs tmpfs rw\n")
    with pytest.raises(ClusterError, match="volume is still mounted"):
        leftovers.remove_tree(folder)
    assert (folder / "volume").is_dir()
    (tmp_path / "mountinfo").write_text("")
    leftovers.remove_tree(folder)
    assert not folder.exists()
    leftovers.remove_tree(folder)


def test_network_namespaces_are_those_of_our_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "CNI_RESULTS", tmp_path)
    for name, namespace in (("ppojob-1-eth0", "/run/netns/a"), ("podman-2-eth0", "/run/netns/b")):
        interfaces = [{"name": "veth1"}, {"name": "eth0", "sandbox": namespace}]
        (tmp_path / name).write_text(json.dumps({"result": {"interfaces": interfaces}}))
    (tmp_path / "ppojob-torn-eth0").write_text("{")
    (tmp_path / "ppojob-other-eth0").write_text("{}")
    assert leftovers.network_namespaces() == [Path("/run/netns/a")]


def test_no_process_of_this_machine_is_a_shim_of_a_cluster_that_never_ran(tmp_path: Path) -> None:
    layout = Layout(cache=tmp_path, state=tmp_path, runtime=tmp_path / "run")
    assert leftovers.shims(layout) == []


@dataclass(frozen=True)
class Clearing:
    """What a `clear` did to the traces that could be another cluster's."""

    removed_kubernetes_chains: list[bool]
    found: list[str]


def clear(layout: Layout, monkeypatch: pytest.MonkeyPatch, *, chains_before: bool, starts: bool) -> Clearing:
    """Start a cluster, or not, on a machine with or without KUBE- chains, and clear it away."""
    asked: list[bool] = []

    def remove(*, with_kubernetes_chains: bool) -> int:
        asked.append(with_kubernetes_chains)
        return 0

    monkeypatch.setattr(cgroups, "ROOT", layout.state / "cgroup")
    monkeypatch.setattr(ownership, "has_kubernetes_chains", lambda: chains_before)
    monkeypatch.setattr(leftovers, "has_kubernetes_chains", lambda: chains_before)
    monkeypatch.setattr(leftovers, "remove_cluster_rules", remove)
    for name in ("_unmount", "_remove_network_namespaces", "_remove_bridge"):
        monkeypatch.setattr(leftovers, name, lambda *_: 0)
    if starts:
        ownership.claim(layout)
    return Clearing(asked, leftovers.clear(layout))


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    monkeypatch.setattr(ownership, "DEVICE_CHECKPOINT", tmp_path / "kubelet_internal_checkpoint")
    return Layout(cache=tmp_path / "cache", state=tmp_path / "state", runtime=tmp_path / "run")


def test_chains_that_were_not_there_before_are_removed(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clear(layout, monkeypatch, chains_before=False, starts=True) == Clearing([True], [])


@pytest.mark.parametrize("starts", [True, False])
def test_chains_that_were_there_before_stay_and_are_named(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    done = clear(layout, monkeypatch, chains_before=True, starts=starts)
    assert done.removed_kubernetes_chains == [False]
    assert done.found == ["left in place: KUBE- chains that were there before this cluster (a reboot removes them)"]


def test_chains_of_the_time_before_a_reboot_are_not_covered(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "has_kubernetes_chains", lambda: False)
    ownership.claim(layout)
    assert ownership.owns_kubernetes_chains(layout)
    monkeypatch.setattr(ownership, "boot_id", lambda: "the next boot")
    assert not ownership.owns_kubernetes_chains(layout)


def test_the_device_checkpoint_of_another_kubelet_is_put_back(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = ownership.DEVICE_CHECKPOINT
    checkpoint.write_text("theirs")
    ownership.claim(layout)
    assert not checkpoint.exists()
    checkpoint.write_text("ours")

    assert clear(layout, monkeypatch, chains_before=False, starts=False).found == ["1 device checkpoint"]
    assert checkpoint.read_text() == "theirs"

    clear(layout, monkeypatch, chains_before=False, starts=False)
    assert checkpoint.read_text() == "theirs"


def test_the_device_checkpoint_of_this_cluster_goes(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    ownership.claim(layout)
    ownership.DEVICE_CHECKPOINT.write_text("ours")
    clear(layout, monkeypatch, chains_before=False, starts=False)
    assert not ownership.DEVICE_CHECKPOINT.exists()
