"""The engines of a pool as the controller calls them; see `rollout` for their processes.

The controller decides which engine gets which rows (`controller.sample_queue`). This module passes them on, and
distinguishes a lost engine from every other failure:

    lost process (its node, its pod, a signal)    what it reported was stored there and is lost, too
    lost vLLM (`EngineLostError`)                 the process stays, because it has the responses that it reported;
                                                  an engine of several nodes is lost with any of them
    out of memory                                 no loss: the other engines would follow, so the attempt ends

The weights' connections are opened again without it. Nothing restarts a lost engine of a fixed pool: the next attempt
has all. Engines of an elastic pool come back: `elastic_rollout`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeAlias

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import EngineLostError
from ppojob_trainer.engines.rollout.engine_nodes import EngineNode
from ppojob_trainer.engines.rollout.options import NO_DRAFTS, Capacity, Drafts
from ppojob_trainer.protocol import Keys
from ppojob_trainer.worker_groups.dispatch import RemoteMethod
from ppojob_trainer.worker_groups.errors import WorkerGroupError, WorkerLostError
from ppojob_trainer.worker_groups.futures import Future
from ppojob_trainer.worker_groups.roles.gpu_holder import GpuHolder, NodePart
from ppojob_trainer.worker_groups.roles.rollout import Collected, RolloutWorker
from ppojob_trainer.worker_groups.stored_rows import NEWER_TOKENS
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup

__all__ = ["Replicas", "Report", "RolloutGroup", "RolloutOfStep"]

logger = logging.getLogger(__name__)

_GRACE_S = 15.0
"""Longest wait for the failure of an engine's other node, whose workers vLLM ends before it reports it."""

P = ParamSpec("P")
Command: TypeAlias = RemoteMethod[RolloutWorker, P, None, P, Future[list[None]]]
"""A method of a replica without an answer."""


@dataclass(frozen=True)
class RolloutOfStep:
    """See `controller.ports.Rollout`."""

    batch: Table

    @property
    def prompt_lengths(self) -> Sequence[int]:
        """Tokens of each prompt."""
        return [total - response for total, response in zip(self.batch.tokens, self.response_lengths, strict=True)]

    @property
    def response_lengths(self) -> Sequence[int]:
        """Tokens of each response."""
        return [int(length) for length in self.batch.sums[Keys.RESPONSE_MASK]]

    @property
    def oldest_versions(self) -> Sequence[int]:
        """Version of the weights that sampled each response's first token; empty unless weights change in flight."""
        return [int(version) for version in self.batch.sums.get(Keys.ROLLOUT_VERSIONS, ())]

    @property
    def newer_tokens(self) -> Sequence[int]:
        """Tokens of each response that newer weights sampled than its first; empty unless weights change in flight."""
        return [int(count) for count in self.batch.sums.get(NEWER_TOKENS, ())]


@dataclass(frozen=True)
class Report:
    """See `controller.ports.Reported`."""

    rows: Sequence[int] = ()
    batch: Table | None = None
    failure: WorkerGroupError | None = None
    are_rows_lost: bool = False

    @classmethod
    def of(cls, collected: Collected | None) -> Report:
        """Take over what a replica returned."""
        return cls() if collected is None else cls(collected.numbers, Table.of_stored(collected.rows))


def is_loss(failure: WorkerGroupError) -> bool:
    """Whether a replica failed because its process or vLLM's processes exited."""
    return isinstance(failure, WorkerLostError) or isinstance(failure.__cause__, EngineLostError)


@dataclass(frozen=True)
class Replicas:
    """The processes of replicas.

    group: the first process of each replica. holders: those of the first replica's other GPUs, then of the second's,
    ...; None: one GPU for each replica. num_nodes: of a replica; each has as many of its GPUs.
    """

    group: WorkerGroup[RolloutWorker]
    holders: WorkerGroup[GpuHolder] | None = None
    num_nodes: int = 1

    @property
    def groups(self) -> list[WorkerGroup[Any]]:
        """All processes."""
        return [self.group] if self.holders is None else [self.group, self.holders]

    @property
    def size(self) -> int:
        """GPUs of a replica."""
        return 1 if self.holders is None else 1 + len(self.holders) // len(self.group)

    async def begin_load(self) -> None:
        """Let replicas start their engines' processes on all their nodes."""
        gpus = [] if self.holders is None else await self.holders.call(GpuHolder.visible_gpu)
        nodes: Sequence[EngineNode | None] = [None] * len(self.group)
        if self.num_nodes > 1:
            nodes = await self.group.call(RolloutWorker.meet, self.num_nodes)
        others = self.size - 1
        parts = [self._parts(node, ["", *gpus[n * others : (n + 1) * others]]) for n, node in enumerate(nodes)]
        starting = [self.group.call(RolloutWorker.begin_load, [part for part, *_ in parts if part is not None])]
        if self.holders is not None and self.num_nodes > 1:
            starting.append(self.holders.call(GpuHolder.begin_load, [part for _, *rest in parts for part in rest]))
        await asyncio.gather(*starting)

    def _parts(self, node: EngineNode | None, gpus: Sequence[str]) -> list[NodePart | None]:
        """Return what each process of a replica starts.

        Args:
            node: the replica's first one; None: it has one node.
            gpus: of the processes; the first one's is not read.
        """
        each = self.size // self.num_nodes
        return [
            NodePart(gpus[at + 1 : at + each], None if node is None else replace(node, index=at // each))
            if at % each == 0
            else None
            for at in range(self.size)
        ]

    async def load(self) -> list[Capacity]:
        """Let the engines allocate their share of the GPUs' memory, and wait until they are ready."""
        loading = asyncio.ensure_future(self.group.call(RolloutWorker.load))
        if self.holders is None or self.num_nodes == 1:
            return await loading
        # The engine waits for its other nodes. If one of them fails, the engine may see it first, and not its cause.
        others = asyncio.ensure_future(self.holders.call(GpuHolder.load))
        await asyncio.wait([loading, others], return_when=asyncio.FIRST_EXCEPTION)
        if not others.done():
            await asyncio.wait([others], timeout=_GRACE_S)
        for one in (others, loading):
            if one.done() and (failure := one.exception()) is not None:
                raise failure
        return await loading

    def holders_of(self, rank: int) -> WorkerGroup[GpuHolder] | None:
        """Return the processes of a replica's other GPUs; None: it has one GPU."""
        others = self.size - 1
        return None if self.holders is None else self.holders.only(*range(rank * others, (rank + 1) * others))


class RolloutGroup:
    """See `controller.ports.RolloutPort`. An engine's number is its replica's rank."""

    def __init__(self, replicas: Replicas, spec: PPOJobSpec, pool: str) -> None:
        self._replicas, self._group, self.pool = replicas, replicas.group, pool
        self.workers_per_replica = replicas.size
        self.sleeps = spec.engines_sleep_in(pool)
        self.has_actor = pool == spec.placement.actor
        self.lost: Mapping[int, WorkerGroupError] = {}
        """The replicas without an engine, and why."""
        self._capacities: dict[int, Capacity] = {}
        self._generations = itertools.count(1)
        self._drafts = NO_DRAFTS

    @property
    def engines(self) -> dict[int, Capacity]:
        """See `RolloutPort`; empty before `load`."""
        return {rank: self._capacities[rank] for rank in self.ranks if rank in self._capacities}

    @property
    def num_lost(self) -> int:
        """See `RolloutPort`."""
        return len(self.lost)

    @property
    def num_replicas(self) -> int:
        """Number of replicas that were started, lost ones included."""
        return len(self._group)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the replicas whose engines get the weights: they were not lost."""
        return [rank for rank in range(self.num_replicas) if rank not in self.lost]

    @property
    def group(self) -> WorkerGroup[RolloutWorker]:
        """The replicas whose engines get the weights, in the order of `ranks`."""
        ranks = self.ranks
        return self._group if len(ranks) == len(self._group) else self._group.only(*ranks)

    @property
    def groups(self) -> list[WorkerGroup[Any]]:
        """All processes that are left: those of the replicas, and those that reserve GPUs for them."""
        without = [rank for rank, failure in self.lost.items() if isinstance(failure, WorkerLostError)]
        left = [rank for rank in range(self.num_replicas) if rank not in without]
        holders = [self._replicas.holders_of(rank) for rank in self.ranks] if self.lost else [self._replicas.holders]
        return [self._group.only(*left) if without else self._group, *(group for group in holders if group is not None)]

    async def begin_load(self) -> None:
        """Start the engines' processes, which load their libraries and then wait for `load`."""
        await self._replicas.begin_load()

    async def load(self) -> None:
        """Let the engines allocate their share of the GPUs' memory, and wait until they are ready."""
        self._capacities = dict(enumerate(await self._replicas.load()))

    def begin(self, step: int, *, is_validation: bool) -> EnginesOfGeneration:
        """See `RolloutPort`."""
        return EnginesOfGeneration(self, next(self._generations), step, is_validation)

    def take_drafts(self) -> Drafts:
        """See `RolloutPort`."""
        drafts, self._drafts = self._drafts, NO_DRAFTS
        return drafts

    def count(self, collected: Collected | None) -> Report:
        """Count the drafts of what a replica returned, and return it as a report."""
        if collected is not None:
            self._drafts = Drafts.total([self._drafts, collected.drafts])
        return Report.of(collected)

    def joined(self, batch: Table) -> RolloutOfStep:
        """See `RolloutPort`."""
        return RolloutOfStep(batch)

    @property
    def keeps_responses(self) -> bool:
        """Whether responses that a replica reported are lost with its process (False), or were copied elsewhere."""
        return False

    async def kept(self, rank: int, responses: Table) -> Table:
        """Return the responses that a replica reported, or a copy of them that is not lost with its process."""
        return responses

    @property
    def comes_back(self) -> bool:
        """Whether lost engines come back."""
        return False

    def admit(self) -> None:
        """Let engines that were started since the last push get the weights; they generate from `use_admitted` on."""

    def use_admitted(self) -> None:
        """Let the engines that were admitted generate: they have the weights."""

    async def wait_for_engine(self) -> None:
        """Wait until an engine can be admitted, for ever in a pool whose engines do not come back."""
        await asyncio.Event().wait()

    def one(self, rank: int) -> WorkerGroup[RolloutWorker]:
        """Return one replica."""
        return self._group.only(rank)

    async def find_lost(self) -> None:
        """Find the engines that were lost while they were idle.

        Raises:
            WorkerGroupError: a replica failed otherwise than by the loss of its engine.
        """
        await asyncio.gather(*(self._unless_lost(rank, RolloutWorker.check) for rank in self.ranks))

    async def abort(self) -> None:
        """Let the engines drop what they have not finished.

        Raises:
            WorkerGroupError: a replica failed otherwise than by the loss of its engine.
        """
        await asyncio.gather(*(self._unless_lost(rank, RolloutWorker.abort) for rank in self.ranks))

    async def sleep(self) -> None:
        """Let the engines release their memory if they share their GPUs.

        Raises:
            WorkerGroupError: a replica failed otherwise than by the loss of its engine.
        """
        if self.sleeps:
            await asyncio.gather(*(self._unless_lost(rank, RolloutWorker.sleep) for rank in self.ranks))

    async def wake(self, part: str) -> None:
        """Let the engines allocate a part of their memory again: `weights` or `kv_cache`.

        Raises:
            WorkerGroupError: a replica failed otherwise than by the loss of its engine.
        """
        if self.sleeps:
            await asyncio.gather(*(self._unless_lost(rank, RolloutWorker.wake, part) for rank in self.ranks))

    async def _unless_lost(self, rank: int, method: Command[P], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await self.one(rank).call(method, *args, **kwargs)
        except WorkerGroupError as error:
            if not is_loss(error):
                raise
            self.lose(rank, error)

    def lose(self, rank: int, failure: WorkerGroupError) -> None:
        """Record that a replica has no engine any more, and end its remaining processes."""
        if rank in self.lost:
            # A generation and a push in flight have both found it.
            return
        self.lost = {**self.lost, rank: failure}
        self.end(rank, failure)
        text = "%s. Engines left in pool %s: %d. Other engines repeat its samples, and the run continues without it"
        logger.warning(text, failure, self.pool, len(self.ranks))

    def end(self, rank: int, failure: WorkerGroupError) -> None:
        """End the other processes of a replica that lost its engine."""
        if not isinstance(failure, WorkerLostError):
            # Nobody waits for it: the process is needed only for the responses that it has stored.
            self._group.only(rank).call(RolloutWorker.stop)
        if (holders := self._replicas.holders_of(rank)) is not None:
            holders.kill()


class EnginesOfGeneration:
    """See `controller.ports.Generating`."""

    def __init__(self, rollout: RolloutGroup, number: int, step: int, is_validation: bool) -> None:
        self._rollout = rollout
        self._number, self._step, self._is_validation = number, step, is_validation

    async def exchange(self, engine: int, rows: Sequence[int], prompts: Table | None, num_rows: int) -> Report:
        """See `Generating`. Two calls, and the replica executes them in this order."""
        replica = self._rollout.one(engine)
        try:
            begun = None
            if prompts is not None:
                about = (list(rows), self._step, self._number, self._is_validation)
                begun = replica.call(RolloutWorker.begin, prompts, *about)
            collecting = replica.call(RolloutWorker.collect, num_rows)
            if begun is not None:
                await begun
            report = self._rollout.count(await collecting)
            if report.batch is not None:
                report = replace(report, batch=await self._rollout.kept(engine, report.batch))
            return report
        except WorkerGroupError as error:
            if not is_loss(error):
                raise
            self._rollout.lose(engine, error)
            is_process_lost = isinstance(error, WorkerLostError)
            return Report(failure=error, are_rows_lost=is_process_lost and not self._rollout.keeps_responses)

    async def abort(self) -> None:
        """See `Generating`.

        Raises:
            WorkerGroupError: a replica failed otherwise than by the loss of its engine.
        """
        await self._rollout.abort()

    async def end(self) -> None:
        """See `Generating`: engines that share their GPU sleep, except after a validation."""
        if not self._is_validation:
            await self._rollout.sleep()
