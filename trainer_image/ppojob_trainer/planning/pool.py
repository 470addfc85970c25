"""The plan of a pool and of its roles. Made by `plan`, read by `remedies` and `report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppojob_trainer.main.memory_fit import Need, PoolMemory, known_error
from ppojob_trainer.planning.engine import EnginePlan
from ppojob_trainer.planning.gpus import Gpu
from ppojob_trainer.planning.roles import PlannedRole
from ppojob_trainer.planning.work import Measured

__all__ = ["PoolPlan", "RolePlan"]


@dataclass(frozen=True)
class RolePlan:
    """One role. need: its memory as the pool's sum takes it. peak: the most bytes of the role's phases on a
    GPU. With a pipeline, both are the maximum over its ranks.
    """

    role: PlannedRole
    measured: Measured
    need: Need
    peak: float
    stays_gathered: bool

    @property
    def stages(self) -> int:
        """Stages of its pipeline; 1 without one."""
        like = self.role.divided_like
        return 1 if like is None else like.pipeline_parallel_size * self.stages_of_a_rank

    @property
    def stages_of_a_rank(self) -> int:
        """Stages that each rank of its pipeline has."""
        return 1 if self.role.divided_like is None else self.role.divided_like.virtual_pipeline_parallel_size

    @property
    def experts_over(self) -> int:
        """GPUs over which the experts of a layer are divided; 1 without expert parallelism."""
        return 1 if self.role.divided_like is None else self.role.divided_like.expert_parallel_size


@dataclass(frozen=True)
class PoolPlan:
    """One pool: bytes on each of its GPUs. changes: what to change if it does not fit, or is close."""

    name: str
    gpu: Gpu
    roles: Sequence[RolePlan]
    engine: EnginePlan | None
    memory: PoolMemory
    changes: Sequence[str] = ()

    @property
    def total(self) -> float:
        """Most bytes in use on a GPU, with CUDA and NCCL."""
        return self.memory.most + self.memory.processes

    @property
    def fits(self) -> bool:
        """Whether the GPU holds them, and the engine's cache a sequence."""
        return self.total <= self.gpu.memory and (self.engine is None or self.engine.fits)

    @property
    def is_close(self) -> bool:
        """Whether it fits, but not with the plan's known error."""
        return self.fits and self.total > self.most_planned

    @property
    def has_experts(self) -> bool:
        """Whether a role has a mixture of experts."""
        return any(found.measured.expert_layers > 0 for found in self.roles)

    @property
    def known_error(self) -> float:
        """The share by which a measured pool of this kind used more memory than planned."""
        return known_error(has_experts=self.has_experts)

    @property
    def most_planned(self) -> float:
        """The most planned bytes that leave room for the known error."""
        return self.gpu.memory / (1 + self.known_error)

    @property
    def verdict(self) -> str:
        """The answer in a word or two."""
        return "close" if self.is_close else "fits" if self.fits else "does not fit"
