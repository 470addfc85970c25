"""Weight transfer: the actor's ranks send the policy's weights, the replicas receive them, and both are compared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.transfer import LinkPlan, Receipt, Receivers, WeightLink, link_plans, verify
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.roles.rollout_group import RolloutGroup
from ppojob_trainer.worker_groups.roles.trained import TrainedWorker
from ppojob_trainer.worker_groups.worker_group import WorkerGroup

__all__ = ["WeightsGroup"]


class WeightsGroup:
    """See `controller.ports.WeightsPort`: actor ranks send, replicas receive, the receipts are compared."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        rollouts: Sequence[RolloutGroup],
        spec: PPOJobSpec,
        neighbours: Sequence[WorkerGroup[Any]] = (),
    ) -> None:
        """`rollouts`: the engines of each pool. `neighbours`: the models that share GPUs with some of them."""
        self._actor = actor
        self._neighbours = neighbours
        self._rollouts = rollouts
        self._device = spec.device
        self._plans = self._link_plans()
        self._num_lost = 0

    @property
    def are_released(self) -> bool:
        """See `WeightsPort`."""
        return any(rollout.sleeps for rollout, _ in self._receiving())

    async def connect(self) -> list[Transports]:
        """Connect senders and receivers; return the transports by which each process sends weights.

        The connections that were open before are closed: one of the receivers was lost.
        """
        self._plans, self._num_lost = self._link_plans(), self._count_lost()
        plans_of = [[plan for plan in self._plans if plan.sender_rank == rank] for rank in range(len(self._actor))]
        links_of = await self._actor.call(ActorWorker.open_weights, plans_of)
        places: dict[int, tuple[WeightLink, int]] = {}
        for plans, links in zip(plans_of, links_of, strict=True):
            for plan, link in zip(plans, links, strict=True):
                places |= {receiver: (link, number + 1) for number, receiver in enumerate(plan.receivers)}
        receiving = (
            rollout.group.call(
                RolloutWorker.connect_weights, [[places[worker] for worker in workers] for workers in replicas]
            )
            for rollout, replicas in self._receiving()
        )
        connecting = self._actor.call(ActorWorker.connect_weights)
        senders, groups = await asyncio.gather(connecting, asyncio.gather(*receiving))
        return [*senders, *(worker for replicas in groups for replica in replicas for worker in replica)]

    def _link_plans(self) -> list[LinkPlan]:
        receivers = []
        for rollout in self._rollouts:
            size = rollout.num_workers // rollout.num_replicas
            lost = frozenset(number for rank in rollout.lost for number in range(rank * size, (rank + 1) * size))
            receivers.append(Receivers(rollout.num_workers, rollout.has_actor, lost))
        return link_plans(self._device, len(self._actor), receivers)

    def _count_lost(self) -> int:
        return sum(len(rollout.lost) for rollout in self._rollouts)

    def _receiving(self) -> list[tuple[RolloutGroup, list[range]]]:
        """Return each pool with engines, and for each of its replicas the numbers of its vLLM workers among all."""
        found, first = [], 0
        for rollout in self._rollouts:
            size = rollout.num_workers // rollout.num_replicas
            if rollout.ranks:
                found.append((rollout, [range(first + n * size, first + (n + 1) * size) for n in rollout.ranks]))
            first += rollout.num_workers
        return found

    async def push(self, version: int) -> dict[str, float]:
        """See `WeightsPort`. If an engine was lost since the last push, connect the others again first.

        The metrics are:

        comm_mb/update_weights: data that all senders sent, in MB (1e6 bytes).
        comm_s/...: seconds of the transfer, without waking the engines up.
        comm_gb_per_s/...: rate for a whole model, which each of vLLM's GPUs receives.
        comm_read_back/...: number of vLLM's GPUs whose parameters were compared with the weights after loading.

        Raises:
            WeightSyncError: a replica has other weights than the actor.
            WorkerGroupError: no engine is left, or a process failed.
        """
        await asyncio.gather(*(rollout.find_lost() for rollout in self._rollouts))
        rollouts = [rollout for rollout, _ in self._receiving()]
        if not rollouts:
            raise next(failure for rollout in self._rollouts for failure in rollout.lost.values())
        asleep = [rollout for rollout in rollouts if rollout.sleeps]
        if asleep:
            freed = (group.call(TrainedWorker.free_cached_memory) for group in self._neighbours)
            await asyncio.gather(*freed)
            await _wake(asleep, "weights")
        if self._num_lost != self._count_lost():
            await self.connect()
        started = time.perf_counter()
        received = (rollout.group.call(RolloutWorker.update_weights, version) for rollout in rollouts)
        sending = self._actor.call(ActorWorker.push_weights, version)
        sent, receipts = await asyncio.gather(sending, asyncio.gather(*received))
        seconds = time.perf_counter() - started
        # All workers of a replica have the same receipt; otherwise the replica would have raised an error.
        receipt_of: dict[int, Receipt] = {
            worker: receipt
            for (_, replicas), answers in zip(self._receiving(), receipts, strict=True)
            for workers, receipt in zip(replicas, answers, strict=True)
            for worker in workers
        }
        sizes = []
        for plan in self._plans:
            receipt = sent[plan.sender_rank]
            assert receipt is not None, "a rank with a plan has sent"
            sizes.append(receipt.num_bytes)
            verify(receipt, [receipt_of[receiver] for receiver in plan.receivers])
        if asleep:
            await _wake(asleep, "kv_cache")
        moved = {"mb": sum(sizes) / 1e6, "s": seconds, "gb_per_s": sizes[0] / 1e9 / seconds}
        moved["read_back"] = float(sum(receipt.is_read_back for receipt in receipt_of.values()))
        return {f"comm_{what}/update_weights": number for what, number in moved.items()}


async def _wake(rollouts: Sequence[RolloutGroup], tag: str) -> None:
    await asyncio.gather(*(rollout.group.call(RolloutWorker.wake, tag) for rollout in rollouts))
