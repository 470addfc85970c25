"""Weight transfer: the actor's ranks send the policy's weights, the replicas receive them, and both are compared.

    admit new engines ─ find lost ones ─ wait if none is left ─┬─ connect, if they are others ─ send ─ verify ─ resume
                                                               ◀── an engine was lost meanwhile ──┘

Engines that got the weights in flight resume when their receipts have been compared: no sample continues with weights
that are not the actor's. That costs one call without data, while the engines are paused.

NCCL's and gloo's groups can neither lose nor gain a member, so all connections are opened again for other engines.

The first push over a connection is complete. If all engines keep their weights between pushes, later ones may be
partial: the actor leaves out what training never changes, as it does with adapters. So an engine that joins, comes back
or was in a push that failed gets everything, because each of these opens the connections again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import RendezvousError, RolloutMemoryError, WeightLinkError
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.plans import LinkPlan, Receivers, WeightLink, engines_keep_weights, link_plans
from ppojob_trainer.engines.weights.receipts import Receipt, verify
from ppojob_trainer.engines.weights.waiting import break_off
from ppojob_trainer.worker_groups.errors import WorkerGroupError, WorkerLostError, WorkerOutOfMemoryError
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.roles.rollout_group import RolloutGroup
from ppojob_trainer.worker_groups.roles.trained import TrainedWorker
from ppojob_trainer.worker_groups.worker_group import WorkerGroup

__all__ = ["WeightsGroup"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_TRIES = 5
"""Pushes in which engines are lost one after the other. More than that is no coincidence."""
_BEFORE_THE_LIMIT_S = 10.0
"""Seconds before its phase ends at which a push stops waiting for engines, so that the failure names the pools."""


class _ActorError(Exception):
    """The actor itself failed, so no other push can succeed."""

    def __init__(self, error: WorkerGroupError) -> None:
        super().__init__(f"{error}")
        self.error = error


@dataclass(frozen=True)
class _Engines:
    """The engines of a pool at one moment: the pool's list and numbers change while others wait.

    group: their processes. workers: for each of them, the numbers of its vLLM workers among those of all pools.
    """

    rollout: RolloutGroup
    group: WorkerGroup[RolloutWorker]
    workers: Sequence[range]


@dataclass(frozen=True)
class _Connection:
    """Whom the last connection has: plans and numbers are those of the moment at which it was opened.

    has_complete_push: all engines got all weights over it, and theirs were compared with the actor's.
    """

    members: list[list[int]]
    plans: list[LinkPlan]
    engines: list[_Engines]
    has_complete_push: bool = False


class WeightsGroup:
    """See `controller.weights_port.WeightsPort`: actor ranks send, replicas receive, the receipts are compared."""

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
        self._are_in_flight = spec.schedule.updates_in_flight
        self._engines_keep_weights = engines_keep_weights(spec)
        self.compared_version: int | None = None
        """See `WeightsPort`."""
        self._connection: _Connection | None = None
        """None: nothing is connected, or a push has failed."""
        self._links: list[WeightLink] = []
        """Those that were opened last."""
        self._wait_s = max(1.0, spec.trainer.phase_timeout_seconds - _BEFORE_THE_LIMIT_S)

    @property
    def come_back(self) -> bool:
        """See `WeightsPort`."""
        return any(rollout.comes_back for rollout in self._rollouts)

    @property
    def are_released(self) -> bool:
        """See `WeightsPort`."""
        return any(engines.rollout.sleeps for engines in self._receiving())

    async def connect(self) -> list[Transports]:
        """Connect senders and receivers; return the transports by which each process sends weights.

        The connections that were open before are closed: a receiver was lost, or there is a new one.
        """
        found = await self._despite_losses(self._connect)
        # All engines have the initial weights.
        for rollout in self._rollouts:
            rollout.use_admitted()
        return found

    async def _connect(self) -> list[Transports]:
        # An engine that is lost from here on is noticed by the next push, because the members are others then.
        self._connection = None
        connection = _Connection(self._members(), self._link_plans(), self._receiving())
        plans_of = [[plan for plan in connection.plans if plan.sender_rank == rank] for rank in range(len(self._actor))]
        links_of = await self._of_actor(self._actor.call(ActorWorker.open_weights, plans_of))
        self._links = [link for links in links_of for link in links]
        places: dict[int, tuple[WeightLink, int]] = {}
        for plans, links in zip(plans_of, links_of, strict=True):
            for plan, link in zip(plans, links, strict=True):
                places |= {receiver: (link, number + 1) for number, receiver in enumerate(plan.receivers)}
        receiving = (
            engines.group.call(
                RolloutWorker.connect_weights, [[places[worker] for worker in workers] for workers in engines.workers]
            )
            for engines in connection.engines
        )
        connecting = self._of_actor(self._actor.call(ActorWorker.connect_weights))
        senders, groups = await asyncio.gather(connecting, asyncio.gather(*receiving))
        self._connection = connection
        return [*senders, *(worker for replicas in groups for replica in replicas for worker in replica)]

    def _link_plans(self) -> list[LinkPlan]:
        receivers = []
        for rollout in self._rollouts:
            size, others = rollout.workers_per_replica, set(range(rollout.num_replicas)).difference(rollout.ranks)
            lost = frozenset(number for rank in others for number in range(rank * size, (rank + 1) * size))
            receivers.append(Receivers(rollout.num_replicas * size, rollout.has_actor, lost, size))
        return link_plans(self._device, len(self._actor), receivers)

    def _members(self) -> list[list[int]]:
        return [rollout.ranks for rollout in self._rollouts]

    def _receiving(self) -> list[_Engines]:
        """Return the engines of each pool that has some."""
        found, first = [], 0
        for rollout in self._rollouts:
            size = rollout.workers_per_replica
            if rollout.ranks:
                workers = [range(first + n * size, first + (n + 1) * size) for n in rollout.ranks]
                found.append(_Engines(rollout, rollout.group, workers))
            first += rollout.num_replicas * size
        return found

    async def push(self, version: int) -> dict[str, float]:
        """See `WeightsPort`. If engines were lost or came since the last push, connect again first.

        The metrics are:

        comm_mb/update_weights: data that all senders sent, in MB (1e6 bytes); of a partial push, without the rest.
        comm_s/...: seconds of the transfer, without waking the engines up.
        comm_gb_per_s/...: rate at which one of vLLM's GPUs receives: a whole model, or its part of one.
        comm_receivers/...: number of vLLM's GPUs that got the weights.
        comm_read_back/...: of these, those whose parameters were compared with the weights after loading.

        Raises:
            WeightSyncError: a replica has other weights than the actor.
            WorkerLostError: no engine is left, and none came back in time.
            WorkerGroupError: a process failed.
        """
        await self.wait_for_engine()
        asleep = [engines.rollout for engines in self._receiving() if engines.rollout.sleeps]
        if asleep:
            freed = (group.call(TrainedWorker.free_cached_memory) for group in self._neighbours)
            await asyncio.gather(*freed)
            await asyncio.gather(*(rollout.wake("weights") for rollout in asleep))
        moved = await self._despite_losses(partial(self._sent, version))
        # It certifies the weights of all engines: those that only some engines compared do not count.
        if moved["read_back"] == moved["receivers"] > 0.0:
            self.compared_version = version
        for rollout in self._rollouts:
            rollout.use_admitted()
        if asleep:
            await asyncio.gather(*(rollout.wake("kv_cache") for rollout in asleep))
        return {f"comm_{what}/update_weights": number for what, number in moved.items()}

    async def wait_for_engine(self) -> None:
        """See `WeightsPort`. Admits engines that are ready, and finds those that were lost.

        Raises:
            WorkerLostError: no engine is left, and none came back in time.
        """
        deadline = time.monotonic() + self._wait_s
        while True:
            for rollout in self._rollouts:
                rollout.admit()
            await asyncio.gather(*(rollout.find_lost() for rollout in self._rollouts))
            if self._receiving():
                return
            failures = [failure for rollout in self._rollouts for failure in rollout.lost.values()]
            back = [rollout for rollout in self._rollouts if rollout.comes_back]
            names = ", ".join(rollout.pool for rollout in back)
            if not back:
                raise failures[0]
            logger.warning("no engine is left: waiting for pods of the elastic pools %s", names)
            waiting = [asyncio.create_task(rollout.wait_for_engine()) for rollout in back]
            left_s = deadline - time.monotonic()
            try:
                done, _ = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()
            if not done:
                last = f"; the last failure: {failures[-1]}" if failures else ""
                raise WorkerLostError(
                    f"no engine was left, and none came back to the elastic pools {names} within {self._wait_s:g} s "
                    f"(trainer.phaseTimeoutSeconds){last}"
                )

    async def _despite_losses(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something with all engines; do it again with the others, if engines are lost meanwhile."""
        for number in range(1, _MAX_TRIES + 1):
            if not self._receiving():
                await self.wait_for_engine()
            # A generation may find the same loss while a push is in flight.
            before = self._members()
            try:
                return await work()
            except _ActorError as failure:
                # Engines that wait for the actor can then serve the next attempt.
                await self._break_off()
                raise failure.error from failure.error.__cause__
            except WorkerGroupError as failure:
                if isinstance(failure, WorkerOutOfMemoryError) or isinstance(failure.__cause__, RolloutMemoryError):
                    # No loss: the others would follow. They may still wait for the actor, and would not answer.
                    raise
                # The remaining ranks have an open connection to the lost engine, and may wait for it.
                self._connection = None
                await self._break_off()
                await asyncio.gather(*(rollout.find_lost() for rollout in self._rollouts))
                if number == _MAX_TRIES or before == self._members():
                    raise
                logger.warning("%s: the weights are sent again, without the engines that were lost meanwhile", failure)
        raise AssertionError("the last try returns or raises")

    async def _break_off(self) -> None:
        """Make the actor and the engines fail where they wait for each other over the links."""
        links, self._links = self._links, []
        await asyncio.gather(*(asyncio.to_thread(break_off, link) for link in links))

    async def _of_actor(self, answer: Awaitable[T]) -> T:
        """Await the actor's answer.

        Raises:
            _ActorError: the actor failed otherwise than by the loss of a receiver.
        """
        try:
            return await answer
        except WorkerGroupError as error:
            if isinstance(error.__cause__, WeightLinkError | RendezvousError):
                raise
            raise _ActorError(error) from error

    async def _sent(self, version: int) -> dict[str, float]:
        """Send the weights to all engines, compare them, and let engines that were paused for them continue."""
        if self._connection is None or self._connection.members != self._members():
            await self._connect()
        connection = self._connection
        assert connection is not None, "it is open after connecting"
        if connection.members != self._members():
            # A generation found a loss meanwhile.
            raise WorkerLostError("an engine was lost while the weights were connected")
        is_partial = connection.has_complete_push and self._engines_keep_weights
        # Whatever ends this push early, the next one is complete.
        self._connection = replace(connection, has_complete_push=False)
        started = time.perf_counter()
        received = (engines.group.call(RolloutWorker.update_weights, version) for engines in connection.engines)
        sending = self._of_actor(self._actor.call(ActorWorker.push_weights, version, is_partial))
        sent, receipts = await asyncio.gather(sending, asyncio.gather(*received))
        seconds = time.perf_counter() - started
        receipt_of: dict[int, Receipt] = {
            worker: receipt
            for engines, answers in zip(connection.engines, receipts, strict=True)
            for workers, receipts_of_workers in zip(engines.workers, answers, strict=True)
            for worker, receipt in zip(workers, receipts_of_workers, strict=True)
        }
        sizes = []
        receipts_of_rank = [iter(of_rank) for of_rank in sent]
        for plan in connection.plans:
            receipt = next(receipts_of_rank[plan.sender_rank])
            sizes.append(receipt.num_bytes)
            verify(receipt, [receipt_of[receiver] for receiver in plan.receivers])
        self._connection = replace(connection, has_complete_push=True)
        if self._are_in_flight:
            await asyncio.gather(*(engines.group.call(RolloutWorker.resume) for engines in connection.engines))
        moved = {"mb": sum(sizes) / 1e6, "s": seconds, "gb_per_s": max(sizes) / 1e9 / seconds}
        moved["receivers"] = float(len(receipt_of))
        moved["read_back"] = float(sum(receipt.is_read_back for receipt in receipt_of.values()))
        return moved
