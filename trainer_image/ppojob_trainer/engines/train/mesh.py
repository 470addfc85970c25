"""The processes that train one model together: rendezvous, device mesh, small sums on the host, shutdown.

`dims` has the axes and their sizes. `init_process_group` is called by an engine's owner, once per process, before an
engine is created. All waits have a time limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import debug

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import RendezvousError
from ppojob_trainer.engines.network import join_process_group
from ppojob_trainer.engines.train.dims import CONTEXT, PIPELINE, REPLICATE, SEQUENCE, SHARD, TENSOR, ParallelDims
from ppojob_trainer.engines.train.expert import ExpertPeers
from ppojob_trainer.engines.train.pipeline import PipelinePeers
from ppojob_trainer.engines.train.sequence import Peers, SequencePeers
from ppojob_trainer.engines.transports import GLOO, NcclLog, Transports

__all__ = ["ParallelMesh", "create_mesh", "init_process_group", "leave_process_group"]


@dataclass(frozen=True)
class ParallelMesh:
    """This process's place among those that train a model together.

    mesh: the ranks over which FSDP shards parameters and averages gradients; two axes if there are copies of the model.
    sums: the group with this rank and one rank of every other data-parallel rank; None: all ranks. tensor_mesh,
    sequence, pipeline: the ranks that work on the same sequences, if there are any. experts: those over which experts
    are divided.
    """

    device: torch.device
    mesh: DeviceMesh
    rank: int
    dims: ParallelDims
    sums: dist.ProcessGroup | None = None
    tensor_mesh: DeviceMesh | None = None
    sequence: SequencePeers | None = None
    pipeline: PipelinePeers | None = None
    experts: ExpertPeers | None = None

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.dims.world_size

    @property
    def name(self) -> str:
        """This rank in logs and errors."""
        return self.dims.name(self.rank)

    @property
    def num_averaged(self) -> int:
        """Number of ranks over which FSDP averages a gradient."""
        return self.mesh.size()

    @property
    def sequence_size(self) -> int:
        """Number of ranks over which the tokens of a micro-batch are divided."""
        return self.dims.slices

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over data-parallel ranks of a small tensor on the CPU. Collective.

        The ranks of one data-parallel rank have equal values. It does not use the accelerator.
        """
        return self._reduce(values, dist.ReduceOp.SUM, self.sums)

    def max(self, values: Tensor) -> Tensor:
        """Return the largest over data-parallel ranks of a small tensor on the CPU. Collective."""
        return self._reduce(values, dist.ReduceOp.MAX, self.sums)

    def sum_of_ranks(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks of a small tensor on the CPU, each of which has its own part. Collective."""
        return self._reduce(values, dist.ReduceOp.SUM, None)

    def first_text(self, text: str) -> str:
        """Return the text of the first rank whose text is not empty; empty if all are. Collective."""
        texts = [text]
        if self.world_size > 1:
            texts = [""] * self.world_size
            dist.all_gather_object(texts, text)
        return next(filter(None, texts), "")

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
        groups = [group for group in self.mesh.get_all_groups() if group.size() > 1]
        if self.tensor_mesh is not None:
            groups.append(self.tensor_mesh.get_group())
        if self.sequence is not None:
            groups += self.sequence.groups
        if self.pipeline is not None:
            groups.append(self.pipeline.group)
        if self.experts is not None:
            groups += self.experts.groups
            if self.experts.size > 1 and dist.group.WORLD is not None:
                # For pushes, whose blocks of experts go to all ranks.
                groups.append(dist.group.WORLD)
        try:
            for group in groups:
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            torch.cuda.synchronize(self.device)
        except (dist.DistError, RuntimeError) as error:
            raise RendezvousError(f"NCCL could not connect {self.name}: {error}") from error
        return log.take()

    def destroy(self) -> None:
        """Leave the process group. All ranks call it; nothing of this object may be used afterwards."""
        if dist.is_initialized():
            leave_process_group()

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
        reduced = values.detach().cpu().clone()
        if self.world_size > 1:
            dist.all_reduce(reduced, op=operation, group=group)
        return reduced


def init_process_group(
    device: Device,
    rank: int,
    dims: ParallelDims,
    store: Store,
    timeout_seconds: float,
    num_local: int | None = None,
) -> ParallelMesh:
    """Join the other ranks: gloo on the CPU; on CUDA NCCL, and gloo for tensors on the host.

    Args:
        store: where the ranks meet, see `network.listen` and `network.connect`.
        timeout_seconds: for the ranks to meet and for every collective afterwards.
        num_local: ranks on this host; by default all.

    Raises:
        ValueError: a tensor- or sequence-parallel group would span hosts.
        RendezvousError: not all ranks joined in time.
    """
    dims.check_host(dims.world_size if num_local is None else num_local)
    has_subgroups = dims.fsdp < dims.world_size or dims.slices > 1 or dims.expert > 1
    is_cuda = device is Device.CUDA
    join_process_group(
        dims.name(rank), store, rank, dims.world_size, timeout_seconds, is_cuda=is_cuda, binds=not has_subgroups
    )
    local = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    return create_mesh(local, rank, dims, timedelta(seconds=timeout_seconds))


def leave_process_group() -> None:
    """Leave the process group, so that this process may join another one. Called by the thread that builds models.

    torch treats meshes of equal ranks and names as equal, and DTensor caches them, in each thread. So the next model
    would get a mesh of this group. torch uses the names of groups again, and that mesh finds its groups by name: its
    collectives would run in another one.
    """
    dist.destroy_process_group()
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def create_mesh(device: torch.device, rank: int, dims: ParallelDims, timeout: timedelta) -> ParallelMesh:
    """Create the groups and the mesh in a process group, as every rank must in the same order."""
    sums, sequence, pipeline, experts = None, None, None, None
    # The ranks of this stage: another one has other parameters.
    ranks = torch.arange(dims.of_stage) + rank // dims.of_stage * dims.of_stage
    if dims.num_shards < dims.world_size:
        sums = _group_of(rank, dims.groups(REPLICATE, SHARD), timeout)
    if dims.slices > 1:
        sequence = _sequence_peers(rank, dims, timeout)
    if dims.pipeline > 1:
        group = _group_of(rank, dims.groups(PIPELINE), timeout)
        pipeline = PipelinePeers(group, dims.coordinates(rank)[PIPELINE], dims.pipeline, dims.virtual)
    if dims.expert > 1 or dims.tensor > 1:
        of_experts = dims.expert_groups()
        mine = {axis: _group_of(rank, groups, timeout) for axis, groups in of_experts.items()}
        experts = ExpertPeers.of(mine, device.type, ranks)
    if dims.fsdp == dims.world_size:
        mesh = init_device_mesh(device.type, (dims.world_size,), mesh_dim_names=(SHARD,))
        return ParallelMesh(device, mesh, rank, dims, sums, sequence=sequence, experts=experts)
    axes = {REPLICATE: (dims.replicate, (REPLICATE,)), SHARD: (dims.fsdp, (SHARD, CONTEXT, SEQUENCE))}
    axes |= {TENSOR: (dims.tensor, (TENSOR,))}
    names = tuple(axis for axis, (size, _) in axes.items() if size > 1 or axis == SHARD)
    # Created explicitly, because the groups that torch creates for a mesh have torch's default timeout.
    groups = [_group_of(rank, dims.groups(*axes[axis][1]), timeout) for axis in names]
    placed = ranks.view([axes[axis][0] for axis in names])
    whole = DeviceMesh.from_group(groups, device.type, placed, mesh_dim_names=names)
    of_fsdp = tuple(axis for axis in names if axis != TENSOR)
    tensor_mesh = whole[TENSOR] if TENSOR in names else None
    return ParallelMesh(device, whole[of_fsdp], rank, dims, sums, tensor_mesh, sequence, pipeline, experts)


def _sequence_peers(rank: int, dims: ParallelDims, timeout: timedelta) -> SequencePeers:
    """Create the groups of the ranks that have slices of the same tokens, and of those of one axis among them."""
    at = dims.coordinates(rank)
    group = _group_of(rank, dims.groups(CONTEXT, SEQUENCE), timeout)
    all_slices = Peers(group, at[CONTEXT] * dims.sequence + at[SEQUENCE], dims.slices)
    of_axis: dict[str, Peers | None] = {}
    for axis, size in ((SEQUENCE, dims.sequence), (CONTEXT, dims.context)):
        if size == 1:
            of_axis[axis] = None
            continue
        # One group for both, where the other axis has one rank.
        of_group = group if size == dims.slices else _group_of(rank, dims.groups(axis), timeout)
        of_axis[axis] = Peers(of_group, at[axis], size)
    return SequencePeers(all_slices, heads=of_axis[SEQUENCE], context=of_axis[CONTEXT])


def _group_of(rank: int, groups: list[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Create all groups, as every rank must, and return this rank's."""
    made = {tuple(ranks): dist.new_group(ranks, timeout=timeout) for ranks in groups}
    mine: dist.ProcessGroup = next(group for ranks, group in made.items() if rank in ranks)
    return mine
