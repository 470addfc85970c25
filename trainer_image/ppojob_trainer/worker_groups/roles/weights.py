"""The way of the policy's weights: the actor's ranks send, the replicas receive, and what arrived is compared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weight_transfer import WeightLink, link_plan, verify
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutGroup, RolloutWorker
from ppojob_trainer.worker_groups.roles.trained import TrainedWorker
from ppojob_trainer.worker_groups.worker_group import WorkerGroup

__all__ = ["WeightsGroup"]


class WeightsGroup:
    """See `controller.ports.WeightsPort`: actor ranks send, replicas receive, the receipts are compared."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        rollout: RolloutGroup,
        spec: PPOJobSpec,
        neighbours: Sequence[WorkerGroup[Any]] = (),
    ) -> None:
        """`neighbours`: the models that share the rollout's GPUs."""
        self._actor = actor
        self._neighbours = neighbours
        self._rollout = rollout.group
        self._sleeps = rollout.sleeps
        self._workers_of_replica = rollout.num_workers // len(rollout.group)
        self._plans = link_plan(
            spec.device,
            num_ranks=len(actor),
            num_receivers=rollout.num_workers,
            is_shared=spec.placement.rollout == spec.placement.actor,
        )

    @property
    def are_given_up(self) -> bool:
        """See `WeightsPort`."""
        return self._sleeps

    async def connect(self) -> list[Transports]:
        """Make the connections, once; return over what each process sends weights."""
        plan_of = {plan.sender_rank: plan for plan in self._plans}
        links = await self._actor.call(
            ActorWorker.open_weights, [plan_of.get(rank) for rank in range(len(self._actor))]
        )
        places: dict[int, tuple[WeightLink, int]] = {}
        for plan in self._plans:
            link = links[plan.sender_rank]
            assert link is not None, "a rank with a plan has a link"
            places |= {receiver: (link, number + 1) for number, receiver in enumerate(plan.receivers)}
        size = self._workers_of_replica
        of_replicas = [[places[first + worker] for worker in range(size)] for first in range(0, len(places), size)]
        connected = self._rollout.call(RolloutWorker.connect_weights, of_replicas)
        senders, replicas = await asyncio.gather(self._actor.call(ActorWorker.connect_weights), connected)
        return [*senders, *(worker for replica in replicas for worker in replica)]

    async def push(self, version: int) -> dict[str, float]:
        """See `WeightsPort`. comm_mb/update_weights: what all senders sent, in MB (1e6 bytes). comm_s/...: how long
        they took, without waking the engines up. comm_gb_per_s/...: of a whole model, as each of vLLM's GPUs gets.

        Raises:
            WeightSyncError: a replica has other weights than the actor.
        """
        if self._sleeps:
            freed = (group.call(TrainedWorker.free_cached_memory) for group in self._neighbours)
            await asyncio.gather(*freed)
            await self._rollout.call(RolloutWorker.wake, "weights")
        started = time.perf_counter()
        sent, received = await asyncio.gather(
            self._actor.call(ActorWorker.push_weights, version),
            self._rollout.call(RolloutWorker.update_weights, version),
        )
        seconds, sizes = time.perf_counter() - started, []
        for plan in self._plans:
            receipt = sent[plan.sender_rank]
            assert receipt is not None, "a rank with a plan has sent"
            sizes.append(receipt.num_bytes)
            # All workers of a replica have the same, or it would have said so.
            verify(receipt, [received[receiver // self._workers_of_replica] for receiver in plan.receivers])
        if self._sleeps:
            await self._rollout.call(RolloutWorker.wake, "kv_cache")
        moved = {"mb": sum(sizes) / 1e6, "s": seconds, "gb_per_s": sizes[0] / 1e9 / seconds}
        return {f"comm_{what}/update_weights": number for what, number in moved.items()}
