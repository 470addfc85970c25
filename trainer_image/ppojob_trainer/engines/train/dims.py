"""How the ranks that train one model together are divided: the axes, their sizes, and the groups of ranks of each axis.

Six axes, the innermost last; the ranks of a host are consecutive:

    pipeline    stages of consecutive layers, one or several of each rank
    replicate   copies of the model, whose gradients are averaged (HSDP)
    shard       FSDP divides parameters, gradients and moments
    context     divides the tokens of a micro-batch; keys and values are gathered for attention
    sequence    Ulysses divides the tokens of a micro-batch; they are exchanged for heads
    tensor      every layer is divided

    4 ranks, tensor 2      FSDP shards over {0, 2} and {1, 3}      each layer is divided over {0, 1} and {2, 3}
    4 ranks, sequence 2    FSDP shards over {0, 1, 2, 3}           tokens are divided over {0, 1} and {2, 3}
    4 ranks, context 2     FSDP shards over {0, 1, 2, 3}           tokens are divided over {0, 1} and {2, 3}
    4 ranks, replicate 2   FSDP shards over {0, 1} and {2, 3}      gradients are averaged over {0, 2} and {1, 3}
    4 ranks, pipeline 2    FSDP shards over {0, 1} and {2, 3}      stage 0 is {0, 1}, stage 1 is {2, 3}
    4 ranks, expert 2      FSDP shards over {0, 1, 2, 3}           experts are divided over {0, 1} and {2, 3}

Ranks that differ in pipeline, context, sequence and tensor alone work on the same sequences, so they are one
data-parallel rank. FSDP shards over shard, context and sequence together, because sequence-parallel ranks need the same
parameters. Context and sequence are one size of the spec, which `heads_and_context` splits. The pipeline is the
outermost axis, because stages send the least. Of the ranks that compute a layer together, only those of context are on
several hosts. Another axis is another field of `ParallelDims`, in its place among `AXES`.

Expert is not a separate axis. It divides the ranks of a copy, for experts alone: consecutive ranks divide the experts
of a layer, and FSDP shards a rank's experts over those in the same place of the other groups. Tensor-parallel ranks
are among them: to the experts, each brings its slice of the tokens.

The callers are the mesh, the roles and the plan, which needs no process group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "AXES",
    "CONTEXT",
    "EXPERT",
    "PIPELINE",
    "REPLICATE",
    "SEQUENCE",
    "SHARD",
    "TENSOR",
    "ParallelDims",
    "heads_and_context",
]

PIPELINE, REPLICATE, SHARD, SEQUENCE, TENSOR = "pipeline", "replicate", "shard", "sequence", "tensor"
CONTEXT: Final = "context"
EXPERT: Final = "expert"
AXES: Final = (PIPELINE, REPLICATE, SHARD, CONTEXT, SEQUENCE, TENSOR)


def heads_and_context(size: int, query_heads: int, key_heads: int, per_host: int | None = None) -> tuple[int, int]:
    """Split a sequence-parallel size into the ranks that divide heads and those that gather keys and values.

    As many ranks of a host as possible divide the heads, because that moves less.

    Args:
        query_heads, key_heads: of a layer, on each tensor-parallel rank.
        per_host: ranks of a host that may divide heads; None: all.

    Returns:
        The sizes of the axes sequence and context, whose product is `size`.
    """
    of_heads = math.gcd(size, query_heads, key_heads, size if per_host is None else per_host)
    return of_heads, size // of_heads


@dataclass(frozen=True)
class ParallelDims:
    """The size of each axis; see the module's docstring. Their product is the number of ranks.

    sequence, context: their product is the sequence-parallel size. expert: ranks of a copy, or of a stage of it, that
    divide the experts of a layer. virtual: stages of each rank.
    """

    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    tensor: int = 1
    context: int = field(default=1, kw_only=True)
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
        if self.fsdp * self.tensor % self.expert:
            of_tensor = f" x tensor {self.tensor}" if self.tensor > 1 else ""
            raise ValueError(
                f"experts cannot be divided over {self.expert} of {self.fsdp}{of_tensor} ranks over which FSDP shards "
                "them: use a divisor"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"virtual {self.virtual} needs pipeline above 1: set it to 1")

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        fsdp: int | None = None,
        sequence: int = 1,
        context: int = 1,
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
        slices = sequence * context
        if world_size % (slices * tensor * pipeline):
            raise ValueError(
                f"{world_size} ranks are not divisible by sequence {slices} x tensor {tensor}{of_pipeline}: use "
                "sizes that divide them"
            )
        of_stage = world_size // pipeline
        fsdp = of_stage // tensor if fsdp is None else fsdp
        if fsdp < 1 or fsdp % slices or of_stage % (fsdp * tensor):
            where = f"{of_stage} ranks of a stage" if pipeline > 1 else f"{world_size} ranks"
            raise ValueError(
                f"FSDP cannot shard over {fsdp} of {where} with sequence {slices} and tensor {tensor}: "
                f"use a multiple of {slices} that divides {of_stage // tensor}"
            )
        of_layers = {"context": context, "pipeline": pipeline, "expert": expert, "virtual": virtual}
        return cls(of_stage // (fsdp * tensor), fsdp // slices, sequence, tensor, **of_layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of `AXES`."""
        return self.pipeline, self.replicate, self.shard, self.context, self.sequence, self.tensor

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
        return self.shard * self.slices

    @property
    def slices(self) -> int:
        """Ranks that each have a slice of the same tokens: the sequence-parallel size of the spec."""
        return self.context * self.sequence

    @property
    def model_parallel(self) -> int:
        """Ranks that compute a layer of the same sequences together; they are consecutive."""
        return self.slices * self.tensor

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
        of_copy, each = self.groups(SHARD, CONTEXT, SEQUENCE, TENSOR), self.expert
        found = {REPLICATE: self.groups(REPLICATE)} if self.replicate > 1 else {}
        found[SHARD] = [ranks[at::each] for ranks in of_copy for at in range(each)]
        found[EXPERT] = [ranks[at : at + each] for ranks in of_copy for at in range(0, len(ranks), each)]
        return found

    def check_host(self, num_local: int) -> None:
        """Refuse groups on several hosts that divide a layer or exchange tokens for heads: those communicate most.

        Args:
            num_local: ranks on this host; those of a host are consecutive.

        Raises:
            ValueError: the groups do not divide them.
        """
        if num_local % (self.sequence * self.tensor):
            raise ValueError(
                f"a group of tensorParallelSize {self.tensor} x {self.sequence} ranks that divide heads would span "
                f"hosts: this one has {num_local} ranks. Let tensorParallelSize x sequenceParallelSize divide "
                "gpusPerNode of the pool"
            )
