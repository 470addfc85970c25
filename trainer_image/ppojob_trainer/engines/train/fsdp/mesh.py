"""The processes that train one model together: rendezvous, device mesh, small sums on the host, and shutdown.

Ranks are ordered as (data-parallel rank, peer). Peers are the ranks of the same tensor- or sequence-parallel group;
they are consecutive and have the same sequences. A tensor-parallel peer holds a part of every layer; a
sequence-parallel peer (Ulysses) computes a slice of the tokens.

    4 ranks, tensor 2      FSDP shards over {0, 2} and {1, 3}      each layer is divided over {0, 1} and {2, 3}
    4 ranks, sequence 2    FSDP shards over {0, 1, 2, 3}           tokens are divided over {0, 1} and {2, 3}

Called by the FSDP engines' owner, once per process, before an engine is created. All waits have a time limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import RendezvousError
from ppojob_trainer.engines.train.sequence import SequencePeers
from ppojob_trainer.engines.transports import GLOO, NcclLog, Transports

MESH_AXIS = "data"
PEER_AXIS = "peer"


@dataclass(frozen=True)
class PeerSizes:
    """The sizes of the tensor- and sequence-parallel groups; at most one of the two is above 1."""

    tensor: int = 1
    sequence: int = 1

    @property
    def peers(self) -> int:
        """Ranks of one data-parallel rank."""
        return self.tensor * self.sequence


@dataclass(frozen=True)
class DataParallel:
    """This process's position among those that train a model together.

    mesh: the ranks over which FSDP shards parameters and averages gradients. sums: the group with this rank and one
    rank of every other data-parallel rank; None: all ranks. tensor_mesh, sequence: the peers, if there are any.
    """

    device: torch.device
    mesh: DeviceMesh
    rank: int
    world_size: int
    sums: dist.ProcessGroup | None = None
    tensor_mesh: DeviceMesh | None = None
    sequence: SequencePeers | None = None

    @property
    def num_averaged(self) -> int:
        """Number of ranks over which FSDP averages a gradient."""
        return self.mesh.size()

    @property
    def sequence_size(self) -> int:
        """Number of ranks over which the tokens of a micro-batch are divided."""
        return 1 if self.sequence is None else self.sequence.size

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over data-parallel ranks of a small tensor on the CPU; peers have equal ones. Collective.

        It does not use the accelerator.
        """
        return self._reduce(values, dist.ReduceOp.SUM, self.sums)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest over data-parallel ranks of a small tensor on the CPU. Collective."""
        return self._reduce(values, dist.ReduceOp.MAX, self.sums)

    def barrier(self) -> None:
        """Wait for all ranks, at most the process group's timeout."""
        self._reduce(torch.zeros(1), dist.ReduceOp.SUM, None)

    def connect(self) -> Transports:
        """Make NCCL open this rank's connections; return the transports by which it sends to others. Collective.

        NCCL connects at the first collective of a group: a broken network is found here, not in a step.

        Raises:
            RendezvousError: NCCL could not connect.
        """
        if self.world_size == 1:
            return {}
        if self.device.type != "cuda":
            return {GLOO: self.world_size - 1}
        log = NcclLog()
        groups = [mesh.get_group() for mesh in (self.mesh, self.tensor_mesh) if mesh is not None and mesh.size() > 1]
        if self.sequence is not None:
            groups.append(self.sequence.group)
        try:
            for group in groups:
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            torch.cuda.synchronize(self.device)
        except (dist.DistError, RuntimeError) as error:
            raise RendezvousError(f"NCCL could not connect rank {self.rank} of {self.world_size}: {error}") from error
        return log.take()

    def destroy(self) -> None:
        """Leave the process group. All ranks call it; nothing of this object may be used afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
        reduced = values.detach().cpu().clone()
        if self.world_size > 1:
            dist.all_reduce(reduced, op=operation, group=group)
        return reduced


def init_process_group(
    device: Device,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    timeout_seconds: float,
    sizes: PeerSizes | None = None,
) -> DataParallel:
    """Join the other ranks: gloo on the CPU; on CUDA NCCL, and gloo for tensors on the host.

    Args:
        master_address, master_port: where rank 0 listens, see `network.free_port`.
        timeout_seconds: for the rendezvous and for every collective afterwards.
        sizes: by default no peers; every rank is a data-parallel rank.

    Raises:
        ValueError: the number of ranks is not divisible by a size, or both sizes are above 1.
        RendezvousError: not all ranks joined in time.
    """
    sizes = sizes or PeerSizes()
    _check(sizes, world_size)
    timeout = timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if device is Device.CUDA else "gloo"
    local = torch.device("cuda", 0) if device is Device.CUDA else torch.device("cpu")
    if device is Device.CUDA:
        # Only the GPU of its bundle is visible to the process.
        torch.cuda.set_device(local)
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{_host(master_address)}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            # With a device id NCCL connects at once, but groups of peers would be split from it and have no gloo.
            device_id=local if device is Device.CUDA and sizes.peers == 1 else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {rank} of {world_size} did not connect to the other ranks at {master_address}:{master_port} "
            f"within {timeout_seconds:g} s: {error}"
        ) from error
    whole = init_device_mesh(local.type, (world_size,), mesh_dim_names=(MESH_AXIS,))
    if sizes.peers == 1:
        return DataParallel(local, whole, rank, world_size)
    return _with_peers(local, whole, rank, sizes, timeout)


def _with_peers(
    device: torch.device, whole: DeviceMesh, rank: int, sizes: PeerSizes, timeout: timedelta
) -> DataParallel:
    world_size = whole.size()
    ranks = torch.arange(world_size).view(-1, sizes.peers)
    # Created explicitly, because the groups that torch creates for a mesh have torch's default timeout.
    sums = _group_of(rank, ranks.t().tolist(), timeout)
    peers = _group_of(rank, ranks.tolist(), timeout)
    if sizes.tensor > 1:
        mesh = DeviceMesh.from_group([sums, peers], device.type, ranks, mesh_dim_names=(MESH_AXIS, PEER_AXIS))
        return DataParallel(device, mesh[MESH_AXIS], rank, world_size, sums, tensor_mesh=mesh[PEER_AXIS])
    sequence = SequencePeers(peers, rank % sizes.peers, sizes.peers)
    return DataParallel(device, whole, rank, world_size, sums, sequence=sequence)


def _group_of(rank: int, groups: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Create all groups, as every rank must, and return this rank's."""
    made = {tuple(ranks): dist.new_group(list(ranks), timeout=timeout) for ranks in groups}
    mine: dist.ProcessGroup = next(group for ranks, group in made.items() if rank in ranks)
    return mine


def _check(sizes: PeerSizes, world_size: int) -> None:
    if sizes.tensor > 1 and sizes.sequence > 1:
        raise ValueError(
            f"tensor parallelism {sizes.tensor} and sequence parallelism {sizes.sequence} cannot be combined: use "
            "one of them"
        )
    if world_size % sizes.peers:
        raise ValueError(f"{sizes.peers} peers do not divide {world_size} ranks")


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
