"""What the tests on GPUs share: the versions, printed first because figures depend on them; free memory; a mesh."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group

MEMORY_LIMIT_SECONDS = 60.0
PACKAGES = ("torch", "torchvision", "triton", "vllm", "ray", "transformers", "flashinfer-python")


def pytest_report_header() -> list[str]:
    """Return the lines that pytest prints before the first test."""
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    lines = [f"versions: Python {platform.python_version()}, {versions}"]
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        lines.append(f"GPUs: {gpus}; CUDA {torch.version.cuda}, NCCL {nccl}, cuDNN {torch.backends.cudnn.version()}")
    else:
        lines.append("GPUs: none, so every test here is skipped")
    return lines


def pytest_runtest_setup() -> None:
    """Wait until the processes of the test before have released their GPUs' memory.

    vLLM refuses to start if the memory in use becomes less while it measures its own. A hook runs before any fixture.
    """
    devices = range(torch.cuda.device_count())
    end, earlier = time.monotonic() + MEMORY_LIMIT_SECONDS, None
    while earlier != (free := [torch.cuda.mem_get_info(device)[0] for device in devices]):
        assert time.monotonic() < end, f"the free memory of the GPUs still changes: {earlier} and {free} bytes"
        earlier = free
        time.sleep(1)


@pytest.fixture(scope="module")
def parallel() -> Iterator[ParallelMesh]:
    """One rank on the first GPU."""
    group = init_process_group(Device.CUDA, 0, ParallelDims(), listen("127.0.0.1", 60), 60)
    yield group
    group.destroy()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is missing"
