"""What a killed cluster left is found by the marks that only it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.cluster import leftovers
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


def test_what_a_kubelet_noted_of_devices_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notes = tmp_path / "kubelet_internal_checkpoint"
    monkeypatch.setattr(leftovers, "DEVICE_NOTES", notes)
    notes.touch()

    assert leftovers._remove_device_notes() == 1
    assert leftovers._remove_device_notes() == 0
    assert not notes.exists()
