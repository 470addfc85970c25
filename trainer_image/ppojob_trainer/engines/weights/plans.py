"""Which rank of the actor sends weights to which of vLLM's workers, by which means, and what of them.

Called by the worker groups and by `ppojob plan`. Without torch and input or output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec

Backend: TypeAlias = Literal["gloo", "nccl", "cuda_ipc"]


@dataclass(frozen=True)
class WeightLink:
    """Where a sender listens, what it will send, and how. It is passed to the replicas as plain data.

    is_divided: all receivers need the same boxes of the weights, and get only those once they have asked for them.
    """

    backend: str
    address: str
    port: int
    num_receivers: int
    timeout_seconds: float
    is_divided: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Return a dictionary of plain values."""
        return asdict(self)


@dataclass(frozen=True)
class LinkPlan:
    """Which FSDP rank sends to which vLLM workers, and how. Workers are numbered over all replicas.

    part: the place of all receivers in their replicas, where they get only what they need of each tensor; None: whole
    tensors.
    """

    sender_rank: int
    backend: Backend
    receivers: tuple[int, ...]
    part: int | None = None


@dataclass(frozen=True)
class Receivers:
    """The vLLM workers of all replicas of a pool, replica by replica.

    on_actor: worker i runs on the GPU of FSDP rank i. lost: workers that receive nothing any more, because their engine
    was lost. num_parts: workers of a replica.
    """

    number: int
    on_actor: bool
    lost: frozenset[int] = frozenset()
    num_parts: int = 1


def engines_keep_weights(spec: PPOJobSpec) -> bool:
    """Whether engines still have at a push what the push before brought, so that it need not come again.

    Engines that sleep discard it. FP8 engines have it, but their weights are compared only where a push brings all
    layers (`quantized_read_back`).
    """
    sleep = any(spec.engines_sleep_in(pool) for pool in spec.placement.rollout_pools)
    return not sleep and spec.rollout.quantization is None


def link_plans(device: Device, num_ranks: int, receivers: Sequence[Receivers]) -> list[LinkPlan]:
    """Decide which rank sends to which workers; the workers are numbered over all pools, in order.

    If a worker is on a rank's GPU, that rank passes a handle of each gathered tensor's memory (CUDA IPC): NCCL refuses
    two processes on one GPU, and no data crosses GPUs twice. Rank 0 sends to all other workers that need whole tensors.
    Those of one place in their replicas get their part from one rank, and the parts come from as many ranks as there
    are: a sender's own bandwidth would be the limit otherwise.
    """
    plans: list[LinkPlan] = []
    apart: dict[int | None, list[int]] = {}
    first = 0
    for pool in receivers:
        numbers = [first + worker for worker in range(pool.number) if worker not in pool.lost]
        if not pool.on_actor or device is Device.CPU:
            for number in numbers:
                part = None if pool.num_parts == 1 else (number - first) % pool.num_parts
                apart.setdefault(part, []).append(number)
            first += pool.number
            continue
        if pool.number > num_ranks:
            raise ValueError(f"{pool.number} rollout workers cannot share the GPUs of {num_ranks} actor ranks")
        plans += [LinkPlan(number - first, "cuda_ipc", (number,)) for number in numbers]
        first += pool.number
    backend: Backend = "gloo" if device is Device.CPU else "nccl"
    plans += [LinkPlan((part or 0) % num_ranks, backend, tuple(workers), part) for part, workers in apart.items()]
    return plans
