"""A tiny model on disk, one process group, and batches: what the tests of the engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines.tiny_llama import make_batch, save_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def parallel() -> Iterator[ParallelMesh]:
    """A group of this process alone; it ends with the file, because the plan's tests need a process without one."""
    torch.set_num_threads(1)
    group = init_process_group(Device.CPU, 0, ParallelDims(), listen("127.0.0.1", 60), 60)
    yield group
    group.destroy()


@pytest.fixture
def batch() -> DataProto:
    return make_batch(8)


@pytest.fixture
def batch_of() -> Callable[..., DataProto]:
    return make_batch
