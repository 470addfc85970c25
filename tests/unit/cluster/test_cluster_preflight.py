"""Beside another Kubernetes nothing is changed: the refusal comes first, and names the process and what to do."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.ports import server_port
from tools.cluster import cgroups, cluster, preflight, process_table
from tools.cluster.demo import run as demo
from tools.cluster.demo.target import ours
from tools.cluster.errors import ClusterError
from tools.cluster.layout import Layout
from tools.cluster.processes import Record, boot_id, start_ticks
from tools.cluster.stages import StageFailed, Stages
from tools.cluster.waiting import wait_until

Command = Callable[[Layout, Stages], object]
HOST, CONTAINER = "net:[1]", "net:[2]"
SHIM = "/usr/bin/containerd-shim-runc-v2 -namespace k8s.io -id 1 -address"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(cache=tmp_path / "cache", state=tmp_path / "state", runtime=tmp_path / "run")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing runs: its /proc and its control groups are folders."""
    monkeypatch.setattr(process_table, "PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    for folder in ("proc/self/ns", "proc/self/net"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/self/ns/net").symlink_to(HOST)
    return tmp_path


def run_process(machine: Path, pid: int, command: str, *, network: str = HOST) -> None:
    folder = machine / "proc" / str(pid)
    (folder / "ns").mkdir(parents=True)
    (folder / "ns/net").symlink_to(network)
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")


def listen(machine: Path, port: int, pid: int | None) -> None:
    """Have the process listen on the port, at all addresses of both families; None is a process that is not visible."""
    line = f"0: 00000000:{port:04X} 00000000:0000 0A 0 0 0 0 0 4711 1"
    (machine / "proc/self/net/tcp6").write_text(f"header\n{line}\n")
    if pid is not None:
        (machine / "proc" / str(pid) / "fd").mkdir()
        (machine / "proc" / str(pid) / "fd/7").symlink_to("socket:[4711]")


def record(layout: Layout, monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    """Have this cluster started the process."""
    monkeypatch.setattr("tools.cluster.processes.start_ticks", lambda _: 1)
    layout.processes.mkdir(parents=True)
    text = json.dumps(asdict(Record(pid, 1, boot_id(), ["kubelet"])))
    (layout.processes / "kubelet.json").write_text(text)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/usr/bin/kubelet --config=/var/lib/kubelet/config.yaml", r"kubelet \(process 41: /usr/bin/kubelet --config"),
        ("kube-apiserver --etcd-servers=x", r"kube-apiserver \(process 41: .*systemctl stop kube-apiserver"),
        ("/snap/microk8s/1/kubelite --x", r"kubelite \(process 41: .*microk8s stop"),
        ("/usr/local/bin/k3s server --docker", r"k3s \(process 41: .*systemctl stop k3s"),
        ("/usr/bin/k0s controller", r"k0s \(process 41: .*k0s stop"),
        (f"{SHIM} /run/containerd/containerd.sock", r"a containerd with pods \(process 41: "),
        (
            "/srv/b/.cache/ppojob/bin/kubelet --config=/srv/b/.local/state/ppojob/cluster/x",
            r"make cluster-down, with",
        ),
    ],
)
def test_another_kubernetes_is_refused_by_its_process(machine: Path, layout: Layout, command: str, words: str) -> None:
    run_process(machine, 41, command)
    for require in (preflight.require_room, preflight.require_no_other_kubernetes):
        with pytest.raises(ClusterError, match=rf"(?s){words}.*run the demo on it: KUBECONFIG=... IMAGE=... OPERATOR_"):
            require(layout)


@pytest.mark.parametrize(
    "command",
    [
        "vim /etc/kubelet",
        "/usr/local/bin/k3s kubectl get pods",
        "/usr/bin/containerd",
        "/usr/bin/containerd-shim-runc-v2 -namespace moby -address /run/containerd/containerd.sock",
        f"{SHIM} {{socket}}",
    ],
    ids=["an editor", "k3s as kubectl", "a containerd without pods", "a container of Docker's", "a shim of ours"],
)
def test_what_is_no_other_kubernetes_is_not_refused(machine: Path, layout: Layout, command: str) -> None:
    run_process(machine, 41, command.format(socket=layout.containerd_socket))
    preflight.require_room(layout)


def test_a_kubelet_in_a_container_is_in_nobodys_way(machine: Path, layout: Layout) -> None:
    run_process(machine, 41, "/usr/bin/kubelet", network=CONTAINER)
    preflight.require_room(layout)


def test_the_kubelet_that_this_cluster_started_is_known(
    machine: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_process(machine, 41, "/usr/bin/kubelet")
    listen(machine, 10250, 41)
    with pytest.raises(ClusterError, match="kubelet"):
        preflight.require_no_other_kubernetes(layout)
    record(layout, monkeypatch, 41)
    preflight.require_room(layout)


@pytest.mark.parametrize(("pid", "words"), [(41, "process 41: an-unknown-one"), (None, "cannot be seen from here")])
def test_a_program_with_a_kubelets_port_is_refused_whatever_its_name(
    machine: Path, layout: Layout, pid: int | None, words: str
) -> None:
    run_process(machine, 41, "an-unknown-one")
    listen(machine, 10250, pid)
    with pytest.raises(ClusterError, match=rf"kubelet \(port 10250 belongs to .*{words}"):
        preflight.require_no_other_kubernetes(layout)


def test_a_port_in_use_blocks_up_and_not_down(machine: Path, layout: Layout) -> None:
    run_process(machine, 41, "flask run")
    listen(machine, 5000, 41)
    preflight.require_no_other_kubernetes(layout)
    with pytest.raises(ClusterError, match=r"port 5000, which registry needs, is taken by process 41: flask run"):
        preflight.require_room(layout)


def test_pods_of_another_kubelet_are_refused(machine: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    run_process(machine, 41, "nginx")
    monkeypatch.setattr(cgroups, "processes_of_other_kubelets", lambda: {41, 42})
    with pytest.raises(ClusterError, match=r"pods of another kubelet \(2 processes, such as process 41: nginx\)"):
        preflight.require_no_other_kubernetes(layout)


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real process of this name, which does nothing."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, tmp_path / "kubelet")
    with subprocess.Popen([tmp_path / "kubelet", "300"]) as process:
        # A program's command line appears a moment after its start.
        wait_until("the command line", lambda: "" if process_table.read(process.pid) else "all of it", limit=240)
        yield process
        process.kill()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts of `up` and `down` that change something, in the order of their calls; none of them is carried out."""
    made: list[str] = []

    def note(name: str) -> Callable[..., str]:
        def call(*_: object, **__: object) -> str:
            made.append(name)
            return ""

        return call

    for name in ("build", "_start_core", "_start_satellites", "_stop_all"):
        monkeypatch.setattr(cluster, name, note(name))
    for module, names in {
        "system_packages": ("ensure",),
        "node": ("set_capacity", "set_labels"),
        "leftovers": ("clear", "remove_tree"),
    }.items():
        for name in names:
            monkeypatch.setattr(f"tools.cluster.{module}.{name}", note(f"{module}.{name}"))
    return made


@pytest.mark.parametrize("command", [cluster.up, cluster.down])
def test_a_real_kubelet_is_refused_before_anything_is_touched(
    layout: Layout,
    kubelet: subprocess.Popen[bytes],
    calls: list[str],
    capsys: pytest.CaptureFixture[str],
    command: object,
) -> None:
    assert callable(command)
    with pytest.raises(StageFailed):
        command(layout, Stages())
    assert f"kubelet (process {kubelet.pid}: {layout.state.with_name('kubelet')} 300)" in capsys.readouterr().out
    assert calls == []
    assert kubelet.poll() is None
    assert not layout.state.exists()


@pytest.mark.parametrize(
    ("command", "required", "changes"),
    [
        (cluster.up, "require_room", ["system_packages.ensure", "build", "_start_core", "_start_satellites"]),
        (cluster.down, "require_no_other_kubernetes", ["_stop_all", "leftovers.clear", "leftovers.remove_tree"]),
    ],
)
def test_the_search_for_another_kubernetes_comes_first(
    layout: Layout,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    required: str,
    changes: list[str],
) -> None:
    monkeypatch.setattr(preflight, required, lambda _: calls.append("preflight"))
    command(layout, Stages())
    assert calls[: 1 + len(changes)] == ["preflight", *changes]


@pytest.mark.usefixtures("kubelet")
def test_the_demo_is_refused_too(layout: Layout, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(demo, "ensure_in_cluster", lambda *_: calls.append("image"))
    monkeypatch.setattr(demo.operator, "install", lambda *_: calls.append("operator"))
    with pytest.raises(StageFailed):
        demo.run(layout, ours(layout), None, limit=60, stages=Stages())
    assert calls == []


def test_a_real_listener_is_found_with_its_process() -> None:
    # Nobody else gets this port when it is closed.
    port = server_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        # This process itself is left out of the table, so its socket has no visible owner.
        assert process_table.listeners([port]) == {port: None}
        # Not `python3`, which may be a script that starts another process with the same socket.
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[server.fileno()]) as child:
            assert process_table.listeners([port]) == {port: child.pid}
            assert process_table.shares_network(child.pid)
            assert child.stdin is not None
            child.stdin.close()
    assert process_table.listeners([port]) == {}
    assert start_ticks(child.pid) is None
