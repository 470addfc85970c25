"""Hands the machine's GPUs to pods: the kubelet's device plugin for `nvidia.com/gpu`.

A pod gets the device nodes of its own GPUs and none of the others', so it cannot open those. It learns which they are
in NVIDIA_VISIBLE_DEVICES; CUDA_VISIBLE_DEVICES is left alone, because inside the pod its GPUs are numbered from 0.
Started by `start` as `python -m tools.cluster.offline.device_plugin --devices /dev`.
"""

from __future__ import annotations

import argparse
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tools.cluster.offline import device_messages as messages

KUBELET_SOCKETS = Path("/var/lib/kubelet/device-plugins")
KUBELET_SOCKET = "kubelet.sock"
SOCKET = "ppojob-gpu.sock"
RESOURCE = "nvidia.com/gpu"
GPU_FOLDERS = Path("/proc/driver/nvidia/gpus")
# Every pod with a GPU needs these; they give access to no GPU by themselves.
CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
_GPU_NODE = re.compile(r"nvidia(\d+)")
_REGISTER_LIMIT_SECONDS = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GPU:
    """One GPU: the driver's id of it, and its device node."""

    id: str
    node: Path


def find_gpus(devices: Path, driver: Path = GPU_FOLDERS) -> list[GPU]:
    """The GPUs whose device nodes are in `devices`, by number. Without the driver's id, the id is the node's name."""
    nodes = {int(match[1]): path for path in devices.iterdir() if (match := _GPU_NODE.fullmatch(path.name))}
    ids = _ids(driver)
    return [GPU(ids.get(number, nodes[number].name), nodes[number]) for number in sorted(nodes)]


def _ids(driver: Path) -> dict[int, str]:
    found = {}
    for path in driver.glob("*/information"):
        values = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", path.read_text(), re.MULTILINE))
        if "Device Minor" in values and values.get("GPU UUID", "").startswith("GPU-"):
            found[int(values["Device Minor"])] = values["GPU UUID"]
    return found


class DevicePlugin:
    """What the kubelet asks of a plugin."""

    def __init__(self, gpus: list[GPU], devices: Path) -> None:
        self._gpus = {gpu.id: gpu for gpu in gpus}
        self._control = [devices / name for name in CONTROL_NODES if (devices / name).exists()]
        self._ended = threading.Event()

    def options(self, request: Any, context: Any) -> Any:
        """Neither a call before a container's start nor a preference among devices is needed."""
        return messages.DevicePluginOptions()

    def list_and_watch(self, request: Any, context: Any) -> Iterator[Any]:
        """Report all GPUs as healthy, once; an end of the stream would mean that they are unavailable."""
        yield messages.ListAndWatchResponse(
            devices=[messages.Device(ID=gpu_id, health="Healthy") for gpu_id in self._gpus]
        )
        context.add_callback(self._ended.set)
        self._ended.wait()

    def allocate(self, request: Any, context: Any) -> Any:
        """Return the device nodes and the variable for the GPUs that the kubelet chose, for each container."""
        return messages.AllocateResponse(
            container_responses=[self._container(list(item.devices_ids)) for item in request.container_requests]
        )

    def _container(self, ids: list[str]) -> Any:
        logger.info("a container gets %s", ", ".join(ids))
        nodes = [*(self._gpus[gpu_id].node for gpu_id in ids), *self._control]
        return messages.ContainerAllocateResponse(
            envs=[messages.Variable(key="NVIDIA_VISIBLE_DEVICES", value=",".join(ids))],
            devices=[
                messages.DeviceSpec(container_path=f"/dev/{node.name}", host_path=str(node), permissions="rw")
                for node in nodes
            ],
        )


def handlers(plugin: DevicePlugin) -> Mapping[str, grpc.RpcMethodHandler]:
    """The plugin's methods under the names of the interface."""

    def single(method: Callable[[Any, Any], Any], request: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(method, request.FromString, _serialized)

    return {
        "GetDevicePluginOptions": single(plugin.options, messages.Empty),
        "Allocate": single(plugin.allocate, messages.AllocateRequest),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(
            plugin.list_and_watch, messages.Empty.FromString, _serialized
        ),
    }


def serve(plugin: DevicePlugin, folder: Path = KUBELET_SOCKETS) -> grpc.Server:
    """Listen beside the kubelet's socket, and make the plugin known to the kubelet.

    Raises:
        grpc.RpcError: the kubelet does not take it.
    """
    (folder / SOCKET).unlink(missing_ok=True)
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    service = grpc.method_handlers_generic_handler(f"{messages.PACKAGE}.DevicePlugin", dict(handlers(plugin)))
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"unix://{folder / SOCKET}")
    server.start()
    with grpc.insecure_channel(f"unix://{folder / KUBELET_SOCKET}") as channel:
        register = channel.unary_unary(
            f"/{messages.PACKAGE}.Registration/Register", _serialized, messages.Empty.FromString
        )
        request = messages.RegisterRequest(version=messages.VERSION, endpoint=SOCKET, resource_name=RESOURCE)
        register(request, timeout=_REGISTER_LIMIT_SECONDS, wait_for_ready=True)
    return server


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=Path, default=Path("/dev"))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    gpus = find_gpus(arguments.devices)
    logger.info("GPUs: %s", gpus)
    serve(DevicePlugin(gpus, arguments.devices)).wait_for_termination()


if __name__ == "__main__":
    main()
