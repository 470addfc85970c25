"""The cluster for a machine without a network: what is packed, what pods get of the machine, and who carries what."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import grpc
import pytest

from tools.cluster.errors import ClusterError
from tools.cluster.layout import PROJECT
from tools.cluster.offline import comparison, device_plugin, host_image, parts
from tools.cluster.offline import device_messages as messages
from tools.cluster.offline.device_plugin import GPU
from tools.cluster.offline.machine import Machine, outermost
from tools.cluster.offline.service_proxy import routes
from tools.cluster.offline.start import missing_libraries


@pytest.mark.parametrize("is_quick", [False, True])
def test_the_parts_are_joined_by_their_own_script(tmp_path: Path, is_quick: bool) -> None:
    programs, sources = (tmp_path / name / "ppojob-cluster" for name in ("a", "b"))
    (programs / "cache").mkdir(parents=True)
    parts.copy_sources(PROJECT, sources)

    parts.compress(programs, tmp_path, parts.PROGRAMS, is_quick=False)
    written = parts.compress(sources, tmp_path, parts.SOURCES, is_quick=is_quick, part_bytes=100_000)
    parts.write_unpack(tmp_path)
    subprocess.run([tmp_path / "unpack.sh", tmp_path / "there"], check=True, timeout=300)

    assert len(written) > 1
    assert {path.stat().st_size for path in written[:-1]} == {100_000}
    there = tmp_path / "there" / "ppojob-cluster"
    assert (there / "cache").is_dir()
    assert (there / "start.sh").stat().st_mode & 0o100
    assert (there / "source/charts/ppojob/Chart.yaml").read_text() == (PROJECT / "charts/ppojob/Chart.yaml").read_text()
    assert (there / "source/tests/__init__.py").is_file()
    # Nothing is installed there, and the operator says which version it is.
    assert [found.name for found in distributions(path=[str(there / "source/operator")])] == ["ppojob"]


def test_libraries_travel_but_the_c_library_does_not() -> None:
    said = """\tlinux-vdso.so.1 (0x00007)
\tlibseccomp.so.2 => /lib/x86_64-linux-gnu/libseccomp.so.2 (0x00007f)
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f)
"""

    assert parts.libraries(said) == [Path("/lib/x86_64-linux-gnu/libseccomp.so.2")]


def test_only_libraries_that_the_machine_lacks_are_added(tmp_path: Path) -> None:
    for name in ("libseccomp.so.2", "libmnl.so.0"):
        (tmp_path / name).touch()
    known = "2 libs found in cache\n\tlibmnl.so.0 (libc6,x86-64) => /lib/libmnl.so.0\n"

    assert missing_libraries(tmp_path, known) == [tmp_path / "libseccomp.so.2"]


def test_no_mounted_folder_lies_in_another() -> None:
    paths = [Path("/opt/env/lib"), Path("/usr"), Path("/opt"), Path("/usr"), Path("/srv/site")]

    assert outermost(paths) == [Path("/usr"), Path("/opt"), Path("/srv/site")]


def test_the_trainer_has_the_site_and_the_operator_its_own_packages(tmp_path: Path) -> None:
    machine = Machine(tmp_path, tmp_path / "site")

    trainer, operator = machine.trainer_environment(), machine.operator_environment()

    assert trainer["PYTHONPATH"].split(":")[-2:] == [f"{tmp_path}/source/trainer_image", f"{tmp_path}/site"]
    assert operator["PYTHONPATH"].split(":")[-2:] == [f"{tmp_path}/source/trainer_image", f"{tmp_path}/packages"]


def test_an_image_names_its_layer_and_has_the_programs(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "etc").mkdir()
    for name in ("passwd", "shadow"):
        (root / "etc" / name).write_text(name)

    layer = host_image.root_layer(root)
    image = host_image.image_archive("localhost/a:1", layer, {"User": "1000"})

    with tarfile.open(fileobj=io.BytesIO(image)) as archive:
        (manifest,) = json.loads(_content(archive, "manifest.json"))
        config = json.loads(_content(archive, manifest["Config"]))
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        members = {member.name: member for member in archive.getmembers()}
    assert manifest["RepoTags"] == ["localhost/a:1"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    assert members["bin"].linkname == "usr/bin"
    assert members["tmp"].mode == 0o1777
    assert members["ppojob/bin/ray"].mode == 0o755
    assert "etc/passwd" in members
    assert "etc/shadow" not in members


def _content(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


def service(address: str, *ports: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"namespace": "n", "name": "s"}, "spec": {"clusterIP": address, "ports": list(ports)}}


def endpoint_slice(ports: list[dict[str, Any]], **ready: bool) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "n", "labels": {"kubernetes.io/service-name": "s"}},
        "ports": ports,
        "endpoints": [
            {"addresses": [address], "conditions": {"ready": is_ready}} for address, is_ready in ready.items()
        ],
    }


HTTPS = {"name": "https", "port": 443, "protocol": "TCP"}


@pytest.mark.parametrize(
    ("services", "slices", "expected"),
    [
        (
            [service("10.96.0.9", HTTPS)],
            [endpoint_slice([{"name": "https", "port": 8443}, {"name": "http", "port": 81}], **{"10.0.0.1": True})],
            {("10.96.0.9", 443): [("10.0.0.1", 8443)]},
        ),
        (
            [service("10.96.0.9", HTTPS)],
            [endpoint_slice([{"name": "https", "port": 8443}], **{"10.0.0.1": False, "10.0.0.2": True})],
            {("10.96.0.9", 443): [("10.0.0.2", 8443)]},
        ),
        ([service("10.96.0.9", HTTPS)], [], {("10.96.0.9", 443): []}),
        ([service("None", HTTPS)], [], {}),
        ([service("10.96.0.9", {"port": 53, "protocol": "UDP"})], [], {}),
    ],
    ids=["by the port's name", "ready ones only", "no endpoint", "headless", "not TCP"],
)
def test_connections_to_a_service_go_to_its_ready_endpoints(
    services: list[dict[str, Any]], slices: list[dict[str, Any]], expected: dict[Any, Any]
) -> None:
    assert routes(services, slices) == expected


def test_gpus_are_found_by_number_and_called_as_the_driver_calls_them(tmp_path: Path) -> None:
    devices, driver = tmp_path / "dev", tmp_path / "gpus"
    devices.mkdir()
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    (driver / "0000:01:00.0").mkdir(parents=True)
    (driver / "0000:01:00.0/information").write_text("Model: \t\t H200\nGPU UUID: \t GPU-a-b\nDevice Minor: \t 10\n")

    assert device_plugin.find_gpus(devices, driver) == [
        GPU("nvidia2", devices / "nvidia2"),
        GPU("GPU-a-b", devices / "nvidia10"),
    ]


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[tuple[Path, list[Any]]]:
    """A folder with a kubelet's socket, and what was registered there."""
    registered: list[Any] = []

    def register(request: Any, context: Any) -> Any:
        registered.append(request)
        return messages.Empty()

    method = grpc.unary_unary_rpc_method_handler(
        register, messages.RegisterRequest.FromString, lambda message: message.SerializeToString()
    )
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": method}),)
    )
    server.add_insecure_port(f"unix://{tmp_path / device_plugin.KUBELET_SOCKET}")
    server.start()
    yield tmp_path, registered
    server.stop(None).wait(10)


def test_a_pod_gets_the_nodes_of_its_own_gpu_and_no_other(sockets: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, registered = sockets
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    gpus = [GPU("GPU-a", tmp_path / "nvidia0"), GPU("GPU-b", tmp_path / "nvidia1")]

    server = device_plugin.serve(device_plugin.DevicePlugin(gpus, tmp_path), folder)
    try:
        with grpc.insecure_channel(f"unix://{folder / device_plugin.SOCKET}") as channel:
            watch = channel.unary_stream(
                "/v1beta1.DevicePlugin/ListAndWatch",
                lambda message: message.SerializeToString(),
                messages.ListAndWatchResponse.FromString,
            )(messages.Empty(), timeout=240)
            listed = next(watch)
            watch.cancel()
            allocated = channel.unary_unary(
                "/v1beta1.DevicePlugin/Allocate",
                lambda message: message.SerializeToString(),
                messages.AllocateResponse.FromString,
            )(
                messages.AllocateRequest(container_requests=[messages.ContainerAllocateRequest(devices_ids=["GPU-b"])]),
                timeout=240,
            )
    finally:
        server.stop(None).wait(10)

    assert [(item.resource_name, item.endpoint, item.version) for item in registered] == [
        ("nvidia.com/gpu", device_plugin.SOCKET, "v1beta1")
    ]
    assert [(item.ID, item.health) for item in listed.devices] == [("GPU-a", "Healthy"), ("GPU-b", "Healthy")]
    (container,) = allocated.container_responses
    assert [(item.container_path, item.host_path) for item in container.devices] == [
        ("/dev/nvidia1", f"{tmp_path}/nvidia1"),
        ("/dev/nvidiactl", f"{tmp_path}/nvidiactl"),
    ]
    assert [(item.key, item.value) for item in container.envs] == [("NVIDIA_VISIBLE_DEVICES", "GPU-b")]


def test_pods_on_one_gpu_are_refused() -> None:
    comparison.require_own_gpus({"a": ["GPU-a", "nvidia0"], "b": ["GPU-b", "nvidia1"]})
    comparison.require_own_gpus({"a": ["nvidia0", "nvidia0"], "b": ["nvidia1", "nvidia1"]})
    with pytest.raises(ClusterError, match="one GPU of its own"):
        comparison.require_own_gpus({"a": ["GPU-a", "nvidia0"], "b": ["GPU-a", "nvidia0"]})
    with pytest.raises(ClusterError, match="one GPU of its own"):
        comparison.require_own_gpus({"a": ["GPU-a", "nvidia0", "nvidia1"], "b": []})


@pytest.mark.parametrize(
    ("num_cpus", "gibibytes", "expected"), [(2, 24, ("500m", "6Gi")), (64, 512, ("8000m", "48Gi"))]
)
def test_each_pod_gets_a_quarter_of_a_small_machine(num_cpus: int, gibibytes: int, expected: tuple[str, str]) -> None:
    assert comparison.share_of_machine(num_cpus, gibibytes << 30) == expected


def test_the_median_leaves_the_warm_up_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(json.dumps({"step": step, comparison.STEP: 10.0 / step}) for step in range(1, 6)))

    assert comparison.median_step(file) == pytest.approx((10 / 4 + 10 / 5) / 2)
    with pytest.raises(ClusterError, match="no step after"):
        comparison.median_step(tmp_path / "missing.jsonl")
