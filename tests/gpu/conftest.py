"""What the tests on GPUs share: the versions, printed first because figures depend on them; free memory; a mesh.

`pytest.mark.gpu` marks a test that needs one GPU, `pytest.mark.gpu(2)` one that needs two (`tools.suite.gpu_marks`).
"""

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
from tools.suite.gpu_marks import Needs

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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --num-gpus, with which `make gpu` runs a file's tests that need the same number of GPUs."""
    parser.addoption("--num-gpus", type=int, help="run only the tests that need exactly this number of GPUs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that --num-gpus does not ask for."""
    wanted: int | None = config.getoption("--num-gpus")
    if wanted is not None:
        config.hook.pytest_deselected(items=[item for item in items if Needs.of(item).num_gpus != wanted])
        items[:] = [item for item in items if Needs.of(item).num_gpus == wanted]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test without its GPUs; else wait until the processes of the test before have released their memory.

    vLLM refuses to start if the memory in use becomes less while it measures its own. A hook runs before any fixture.
    """
    needs, visible = Needs.of(item), torch.cuda.device_count()
    if visible < needs.num_gpus:
        # `make gpu` runs only what has enough, so a test without its GPUs must not count as passed there.
        is_dealt = item.config.getoption("--num-gpus") is not None
        (pytest.fail if is_dealt else pytest.skip)(f"needs {needs.num_gpus} GPUs, and {visible} are visible")
    if torch.cuda.get_device_capability() < needs.capability:
        pytest.skip(f"needs a GPU of compute capability {needs.capability}")
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
