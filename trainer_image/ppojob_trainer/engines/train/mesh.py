"""The processes that train one model together: their sizes, rendezvous, device mesh, small sums on the host, shutdown.

Five axes, the innermost last; the ranks of a host are consecutive:

    pipeline    stages of consecutive layers, one or several of each rank
    replicate   copies of the model, whose gradients are averaged (HSDP)
    shard       FSDP divides parameters, gradients and moments
    sequence    Ulysses divides the tokens of a micro-batch
    tensor      every layer is divided

    4 ranks, tensor 2      FSDP shards over {0, 2} and {1, 3}      each layer is divided over {0, 1} and {2, 3}
    4 ranks, sequence 2    FSDP shards over {0, 1, 2, 3}           tokens are divided over {0, 1} and {2, 3}
    4 ranks, replicate 2   FSDP shards over {0, 1} and {2, 3}      gradients are averaged over {0, 2} and {1, 3}
    4 ranks, pipeline 2    FSDP shards over {0, 1} and {2, 3}      stage 0 is {0, 1}, stage 1 is {2, 3}
    4 ranks, expert 2      FSDP shards over {0, 1, 2, 3}           experts are divided over {0, 1} and {2, 3}

Ranks that differ in pipeline, sequence and tensor alone work on the same sequences, so they are one data-parallel rank.
FSDP shards over shard and sequence together, because sequence-parallel ranks need the same parameters. The pipeline is
the outermost axis, because stages send the least: hosts are between stages, not between ranks of a layer. Another axis
is another field of `ParallelDims`, in its place among `AXES`.

Expert is not a separate axis. It divides the ranks over which FSDP shards, for experts alone: consecutive ranks divide
the experts of a layer, and FSDP shards the experts of a rank over those in the same place of the other groups.

`init_process_group` is called by an engine's owner, once per process, before an engine is created. All waits have a
time limit.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import RendezvousError
from ppojob_trainer.engines.train.expert import ExpertPeers
from ppojob_trainer.engines.train.pipeline import PipelinePeers
from ppojob_trainer.engines.train.sequence import SequencePeers
from ppojob_trainer.engines.transports import GLOO, NcclLog, Transports

__all__ = ["AXES", "PIPELINE", "SHARD", "ParallelDims", "ParallelMesh", "create_mesh", "init_process_group"]

logger = logging.getLogger(__name__)

PIPELINE, REPLICATE, SHARD, SEQUENCE, TENSOR = "pipeline", "replicate", "shard", "sequence", "tensor"
EXPERT: Final = "expert"
AXES: Final = (PIPELINE, REPLICATE, SHARD, SEQUENCE, TENSOR)


@dataclass(frozen=True)
class ParallelDims:
    """The size of each axis; see the module's docstring. Their product is the number of ranks.

    expert: ranks of those over which FSDP shards that divide the experts of a layer. virtual: stages of each rank.
    """

    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    tensor: int = 1
    pipeline: int = field(default=1, kw_only=True)
    expert: int = field(default=1, kw_only=True)
    virtual: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse sizes below 1, experts that cannot be divided, and several stages of a rank without a pipeline.

        Raises:
            ValueError: with the axis and its size.
        """
        for axis, size in zip((*AXES, EXPERT, "virtual"), (*self.sizes, self.expert, self.virtual), strict=True):
            if size < 1:
                raise ValueError(f"the size of the {axis} axis is {size}: it must be at least 1")
        if self.fsdp % self.expert:
            raise ValueError(
                f"experts cannot be divided over {self.expert} of {self.fsdp} ranks over which FSDP shards: use a "
                "divisor"
            )
        if self.expert > 1 and self.tensor > 1:
            raise ValueError(f"expert {self.expert} with tensor {self.tensor} is not supported: set one of them to 1")
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"virtual {self.virtual} needs pipeline above 1: set it to 1")

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        fsdp: int | None = None,
        sequence: int = 1,
        tensor: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        virtual: int = 1,
    ) -> ParallelDims:
        """Divide a number of ranks.

        Args:
            fsdp: ranks over which FSDP shards a copy of the model or of a stage, sequence-parallel ones included; None:
                all of the stage.

        Raises:
            ValueError: the sizes do not divide the ranks.
        """
        of_pipeline = f" x pipeline {pipeline}" if pipeline > 1 else ""
        if world_size % (sequence * tensor * pipeline):
            raise ValueError(
                f"{world_size} ranks are not divisible by sequence {sequence} x tensor {tensor}{of_pipeline}: use "
                "sizes that divide them"
            )
        of_stage = world_size // pipeline
        fsdp = of_stage // tensor if fsdp is None else fsdp
        if fsdp < 1 or fsdp % sequence or of_stage % (fsdp * tensor):
            where = f"{of_stage} ranks of a stage" if pipeline > 1 else f"{world_size} ranks"
            raise ValueError(
                f"FSDP cannot shard over {fsdp} of {where} with sequence {sequence} and tensor {tensor}: "
                f"use a multiple of {sequence} that divides {of_stage // tensor}"
            )
        copies, shards = of_stage // (fsdp * tensor), fsdp // sequence
        return cls(copies, shards, sequence, tensor, pipeline=pipeline, expert=expert, virtual=virtual)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of `AXES`."""
        return self.pipeline, self.replicate, self.shard, self.sequence, self.tensor

    @property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.sizes)

    @property
    def of_stage(self) -> int:
        """Ranks of a pipeline stage; they are consecutive. Without a pipeline, all."""
        return self.world_size // self.pipeline

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP shards a copy of the model, or of this rank's stage and tensor-parallel part of it."""
        return self.shard * self.sequence

    @property
    def model_parallel(self) -> int:
        """Ranks that compute a layer of the same sequences together; they are consecutive."""
        return self.sequence * self.tensor

    @property
    def num_shards(self) -> int:
        """Data-parallel ranks, each with its own sequences."""
        return self.replicate * self.shard

    def shard_of(self, rank: int) -> int:
        """Return the number of a rank's data-parallel rank."""
        return rank % self.of_stage // self.model_parallel

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position on each axis."""
        found: dict[str, int] = {}
        for axis, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES}

    def name(self, rank: int) -> str:
        """Return a rank's name for logs and errors, such as `rank 5 of 8 (shard 1 of 2, tensor 1 of 2)`."""
        sizes = dict(zip(AXES, self.sizes, strict=True))
        places = [f"{axis} {at} of {sizes[axis]}" for axis, at in self.coordinates(rank).items() if sizes[axis] > 1]
        return f"rank {rank} of {self.world_size}" + (f" ({', '.join(places)})" if len(places) > 1 else "")

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ in these axes alone. Together they are all ranks."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            outside = tuple(at for axis, at in self.coordinates(rank).items() if axis not in axes)
            found.setdefault(outside, []).append(rank)
        return list(found.values())

    def expert_groups(self) -> dict[str, list[list[int]]]:
        """Return by axis the groups of the experts' mesh: copies, ranks with the same experts, consecutive owners."""
        of_fsdp, each = self.groups(SHARD, SEQUENCE), self.expert
        found = {REPLICATE: self.groups(REPLICATE)} if self.replicate > 1 else {}
        found[SHARD] = [ranks[at::each] for ranks in of_fsdp for at in range(each)]
        found[EXPERT] = [ranks[at : at + each] for ranks in of_fsdp for at in range(0, self.fsdp, each)]
        return found

    def check_host(self, num_local: int) -> None:
        """Refuse tensor- and sequence-parallel groups that span hosts: they communicate in every layer.

        Args:
            num_local: ranks on this host; those of a host are consecutive.

        Raises:
            ValueError: the groups do not divide them.
        """
        if num_local % self.model_parallel:
            raise ValueError(
                f"a group of tensorParallelSize {self.tensor} x sequenceParallelSize {self.sequence} ranks would span "
                f"hosts: this one has {num_local} of them. Let their product divide gpusPerNode of the pool"
            )


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
        return self.dims.sequence

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
            groups.append(self.sequence.group)
        if self.pipeline is not None:
            groups.append(self.pipeline.group)
        if self.experts is not None:
            groups += self.experts.groups
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
            dist.destroy_process_group()

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
    timeout = timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if device is Device.CUDA else "gloo"
    local = torch.device("cuda", 0) if device is Device.CUDA else torch.device("cpu")
    if device is Device.CUDA:
        # Only the GPU of its bundle is visible to the process.
        torch.cuda.set_device(local)
    has_subgroups = dims.fsdp < dims.world_size or dims.sequence > 1 or dims.expert > 1
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=dims.world_size,
            timeout=timeout,
            # With a device id NCCL connects at once, but other groups would be split from it and have no gloo.
            device_id=local if device is Device.CUDA and not has_subgroups else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"{dims.name(rank)} did not connect to the other ranks within {timeout_seconds:g} s: {error}"
        ) from error
    logger.info("%s has joined", dims.name(rank))
    return create_mesh(local, rank, dims, timeout)


def create_mesh(device: torch.device, rank: int, dims: ParallelDims, timeout: timedelta) -> ParallelMesh:
    """Create the groups and the mesh in a process group, as every rank must in the same order."""
    sums, sequence, pipeline, experts = None, None, None, None
    # The ranks of this stage: another one has other parameters.
    ranks = torch.arange(dims.of_stage) + rank // dims.of_stage * dims.of_stage
    if dims.num_shards < dims.world_size:
        sums = _group_of(rank, dims.groups(REPLICATE, SHARD), timeout)
    if dims.sequence > 1:
        group = _group_of(rank, dims.groups(SEQUENCE), timeout)
        sequence = SequencePeers(group, dims.coordinates(rank)[SEQUENCE], dims.sequence)
    if dims.pipeline > 1:
        group = _group_of(rank, dims.groups(PIPELINE), timeout)
        pipeline = PipelinePeers(group, dims.coordinates(rank)[PIPELINE], dims.pipeline, dims.virtual)
    if dims.expert > 1:
        of_experts = dims.expert_groups()
        mine = {axis: _group_of(rank, groups, timeout) for axis, groups in of_experts.items()}
        experts = ExpertPeers.of(mine, device.type, ranks)
    if dims.fsdp == dims.world_size:
        mesh = init_device_mesh(device.type, (dims.world_size,), mesh_dim_names=(SHARD,))
        return ParallelMesh(device, mesh, rank, dims, sums, sequence=sequence, experts=experts)
    axes = {REPLICATE: (dims.replicate, (REPLICATE,)), SHARD: (dims.fsdp, (SHARD, SEQUENCE))}
    axes |= {TENSOR: (dims.tensor, (TENSOR,))}
    names = tuple(axis for axis, (size, _) in axes.items() if size > 1 or axis == SHARD)
    # Created explicitly, because the groups that torch creates for a mesh have torch's default timeout.
    groups = [_group_of(rank, dims.groups(*axes[axis][1]), timeout) for axis in names]
    placed = ranks.view([axes[axis][0] for axis in names])
    whole = DeviceMesh.from_group(groups, device.type, placed, mesh_dim_names=names)
    of_fsdp = tuple(axis for axis in names if axis != TENSOR)
    tensor_mesh = whole[TENSOR] if TENSOR in names else None
    return ParallelMesh(device, whole[of_fsdp], rank, dims, sums, tensor_mesh, sequence, pipeline, experts)


def _group_of(rank: int, groups: list[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Create all groups, as every rank must, and return this rank's."""
    made = {tuple(ranks): dist.new_group(ranks, timeout=timeout) for ranks in groups}
    mine: dist.ProcessGroup = next(group for ranks, group in made.items() if rank in ranks)
    return mine
