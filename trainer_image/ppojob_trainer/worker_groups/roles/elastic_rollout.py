"""The engines of an elastic pool, whose nodes come and go while the job runs.

    a node joins ── reserve a place ── start a replica ── load ──┬─ ready ── the next push of the weights ── generates
                         ▲                                       │                                              │
                         └── after a pause, if the node is there ┴──────────── lost, or could not start ────────┘

No step waits for an engine that starts: `watch` starts engines beside the run, and the next push of the weights admits
those that are ready. Their first weights are compared like all others. A lost engine is ended at once, with its
process: what it reported was copied into the data's process. Ranks are never used again, so a rank names one engine in
all logs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ObjectLostError

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import EngineLostError
from ppojob_trainer.engines.rollout.options import Capacity
from ppojob_trainer.worker_groups.communication import is_of_communication
from ppojob_trainer.worker_groups.elastic_nodes import ElasticNodes, EnginePlace, FoundNodes
from ppojob_trainer.worker_groups.errors import PoolNotPlacedError, WorkerGroupError, WorkerLostError
from ppojob_trainer.worker_groups.launch import wait_until_up
from ppojob_trainer.worker_groups.placement import PlacedPool
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.roles.rollout_group import Replicas, RolloutGroup
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup

__all__ = ["ElasticRolloutGroup", "StartReplica"]

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""Seconds between two polls of the pool's nodes."""
PAUSE_S = 30.0
"""Seconds before an engine is started again at a place where one has just failed: its node may be about to leave."""


StartReplica = Callable[[PlacedPool, int], Replicas]
"""Starts a replica in a place, with the given rank."""


@dataclass(frozen=True)
class _Engine:
    """A replica that was started and not ended."""

    place: EnginePlace
    reserved: PlacedPool
    replica: Replicas


class ElasticRolloutGroup(RolloutGroup):
    """See the module's docstring. `ranks` has the engines that were admitted and not lost, and `engines` those of them
    that have got weights since."""

    def __init__(
        self,
        spec: PPOJobSpec,
        pool: str,
        nodes: ElasticNodes,
        start: StartReplica,
        none: WorkerGroup[RolloutWorker],
        keep: Callable[[Table], Awaitable[Table]],
    ) -> None:
        """
        Args:
            none: the role's group without a process.
            keep: copies responses into a process outside of the pool.
        """
        super().__init__(Replicas(none), spec, pool)
        self.workers_per_replica = spec.rollout.gpus_per_replica
        elastic = spec.pool(pool).elastic
        assert elastic is not None, "the pool is elastic"
        self._min_nodes = elastic.min_nodes
        self._nodes, self._start_replica, self._keep = nodes, start, keep
        self._live: dict[int, _Engine] = {}
        self._admitted: list[int] = []
        self._used: list[int] = []
        self._starting: dict[EnginePlace, asyncio.Task[None]] = {}
        self._not_before: dict[EnginePlace, float] = {}
        self._refused: WorkerGroupError | None = None
        self._changed = asyncio.Event()

    @property
    def ranks(self) -> list[int]:
        """See `RolloutGroup`."""
        return [rank for rank in self._admitted if rank in self._live]

    @property
    def engines(self) -> dict[int, Capacity]:
        """See `RolloutPort`."""
        return {rank: capacity for rank, capacity in super().engines.items() if rank in self._used}

    @property
    def groups(self) -> list[WorkerGroup[Any]]:
        """See `RolloutGroup`."""
        return [group for engine in self._live.values() for group in engine.replica.groups]

    @property
    def keeps_responses(self) -> bool:
        """See `RolloutGroup`."""
        return True

    @property
    def comes_back(self) -> bool:
        """See `RolloutGroup`."""
        return True

    async def kept(self, rank: int, responses: Table) -> Table:
        """See `RolloutGroup`.

        Raises:
            WorkerLostError: the replica was lost before its responses were copied.
        """
        try:
            return await self._keep(responses)
        except WorkerGroupError as error:
            if not isinstance(error.__cause__, ObjectLostError):
                raise
            words = f"{self._group.role} rank {rank} was lost before its responses were copied: {error}"
            raise WorkerLostError(words).of(self._group.role) from error.__cause__

    async def begin_load(self) -> None:
        """Start the engines of the nodes that are there."""
        await self._start_missing()

    async def load(self) -> None:
        """Wait until the pool has its smallest number of nodes, and until the engines of all its nodes are ready.

        Raises:
            WorkerGroupError: an engine could not start, and not because it was lost.
        """
        while True:
            found = await self._start_missing()
            await asyncio.gather(*self._starting.values())
            if self._refused is not None:
                raise self._refused
            if found.num_pods >= self._min_nodes and len(self._capacities) >= min(self._min_nodes, len(found.places)):
                self.admit()
                self.use_admitted()
                return
            await asyncio.sleep(POLL_S)

    async def watch(self) -> None:
        """Start engines on nodes that join, and again where one was lost, until it is cancelled."""
        try:
            while True:
                try:
                    await self._start_missing()
                except Exception:
                    # Ray may not answer for a while. The engines that are there generate meanwhile.
                    logger.exception("the nodes of the elastic pool %s could not be read", self.pool)
                await asyncio.sleep(POLL_S)
        finally:
            for task in self._starting.values():
                task.cancel()

    def admit(self) -> None:
        """See `RolloutGroup`."""
        ready = [rank for rank in self._capacities if rank in self._live and rank not in self._admitted]
        if ready and self._admitted:
            names = ", ".join(map(str, ready))
            logger.info("pool %s: the engines of rank %s get weights, and generate from now on", self.pool, names)
        self._admitted = sorted([*self.ranks, *ready])

    def use_admitted(self) -> None:
        """See `RolloutGroup`."""
        self._used = self._admitted

    async def wait_for_engine(self) -> None:
        """See `RolloutGroup`."""
        while not any(rank in self._live and rank not in self._admitted for rank in self._capacities):
            self._changed.clear()
            await self._changed.wait()

    async def _start_missing(self) -> FoundNodes:
        """Start an engine at each place that has none; return the nodes that were found."""
        found, now = await self._nodes.find(), time.monotonic()
        taken = {*self._starting, *(engine.place for engine in self._live.values())}
        for place in found.places:
            if place not in taken and now >= self._not_before.get(place, 0.0):
                self._starting[place] = asyncio.create_task(self._start(place))
        return found

    async def _start(self, place: EnginePlace) -> None:
        rank: int | None = None
        try:
            reserved = await self._nodes.reserve(place)
            rank = len(self._group)
            replica = self._start_replica(reserved, rank)
            self._group = self._group.extended_by(replica.group)
            self._live[rank] = _Engine(place, reserved, replica)
            await wait_until_up(replica.groups)
            await replica.begin_load()
            [capacity] = await replica.load()
        except WorkerGroupError as error:
            self._could_not_start(place, rank, error)
        else:
            self._capacities[rank] = capacity
            logger.info("pool %s: the engine of rank %d is ready", self.pool, rank)
        finally:
            del self._starting[place]
            self._changed.set()

    def _could_not_start(self, place: EnginePlace, rank: int | None, error: WorkerGroupError) -> None:
        is_loss = isinstance(error, (WorkerLostError, PoolNotPlacedError)) or isinstance(
            error.__cause__, EngineLostError
        )
        if not is_loss and not is_of_communication(error.__cause__):
            self._refused = error
        words = "%s: no engine could be started in pool %s; the next try on this node is in %g s at the earliest"
        logger.warning(words, error, self.pool, PAUSE_S)
        self._not_before[place] = time.monotonic() + PAUSE_S
        if rank is not None:
            self._end(rank)

    def end(self, rank: int, failure: WorkerGroupError) -> None:
        """End a replica that lost its engine; another one is started at its place, if the node is still there."""
        if rank in self._live:
            self._not_before[self._live[rank].place] = time.monotonic() + PAUSE_S
            self._end(rank)

    def _end(self, rank: int) -> None:
        engine = self._live.pop(rank)
        self._capacities.pop(rank, None)
        for group in engine.replica.groups:
            group.kill()
        engine.reserved.release()

    def release(self) -> None:
        """Release all places, when the run ends; processes that still run in them are terminated."""
        for rank in list(self._live):
            self._end(rank)
