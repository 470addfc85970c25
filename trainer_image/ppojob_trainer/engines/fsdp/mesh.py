"""The processes that train one model together: rendezvous, device mesh, small sums on the host, and the end.

Called by the FSDP engines' owner, once in a process, before an engine is made. It waits for nothing without a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import RendezvousError

MESH_AXIS = "data"


@dataclass(frozen=True)
class DataParallel:
    """This process's place among those that train a model together."""

    device: torch.device
    mesh: DeviceMesh
    rank: int
    world_size: int

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of a small tensor on the CPU. Collective; never touches the accelerator."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest over ranks of a small tensor on the CPU. Collective."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Wait for all ranks, at most the process group's timeout."""
        self.sum(torch.zeros(1))

    def destroy(self) -> None:
        """Leave the process group. All ranks call it; nothing of this object may be used afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        reduced = values.detach().cpu().clone()
        if self.world_size > 1:
            dist.all_reduce(reduced, op=operation)
        return reduced


def init_process_group(
    device: Device,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    timeout_seconds: float,
) -> DataParallel:
    """Join the other ranks: gloo on the CPU; on CUDA NCCL, and gloo for tensors on the host.

    Args:
        master_address, master_port: where rank 0 listens, see `network.free_port`.
        timeout_seconds: for the rendezvous and for every collective afterwards.

    Raises:
        RendezvousError: not all ranks came in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if device is Device.CUDA else "gloo"
    local = torch.device("cuda", 0) if device is Device.CUDA else torch.device("cpu")
    if device is Device.CUDA:
        # The process sees one GPU: its bundle's.
        torch.cuda.set_device(local)
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{_host(master_address)}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=local if device is Device.CUDA else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {rank} of {world_size} did not meet the others at {master_address}:{master_port} "
            f"within {timeout_seconds:g} s: {error}"
        ) from error
    mesh = init_device_mesh(local.type, (world_size,), mesh_dim_names=(MESH_AXIS,))
    return DataParallel(local, mesh, rank, world_size)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
