"""A process that leaves a process group joins another one, as the tests of several layouts and the plan do."""

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import init_process_group
from tests.unit.trainer.engines.fsdp_engines import policy_engine


def test_the_next_model_is_on_the_mesh_of_its_own_group(model_path: Path) -> None:
    """torch treats both meshes as equal. The group of the first one is destroyed before the second model is built."""
    torch.set_num_threads(1)
    for _ in range(2):
        parallel = init_process_group(Device.CPU, 0, ParallelDims(), listen("127.0.0.1", 60), 60)
        engine = policy_engine(
            parallel, ActorModel(path=str(model_path)), ActorSpec(), AlgorithmSpec(), total_steps=1, dtype=torch.float32
        )
        meshes = [weight.device_mesh for weight in engine.module.parameters() if isinstance(weight, DTensor)]
        parallel.destroy()

        assert meshes
        assert all(mesh is parallel.mesh for mesh in meshes)
