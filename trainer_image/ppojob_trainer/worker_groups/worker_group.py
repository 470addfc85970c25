"""A role's processes as one object to call.

`WorkerGroup.call(ActorWorker.update_actor, table)` splits the arguments as the method's dispatch mode says, sends each
rank its part, and returns a future of the merged answer. Created by the roles' groups at start; it does not compute.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from ppojob_trainer.telemetry import current_phase
from ppojob_trainer.worker_groups.dispatch import Dispatch, Execute, RemoteMethod, merge_metrics, split_all_to_all
from ppojob_trainer.worker_groups.futures import Future, Origin, TableFuture
from ppojob_trainer.worker_groups.observation import Observations
from ppojob_trainer.worker_groups.partition import Partition, contiguous
from ppojob_trainer.worker_groups.table import Table

__all__ = ["WorkerGroup"]

W = TypeVar("W")
C = ParamSpec("C")
M = TypeVar("M")


@dataclass(frozen=True)
class Peers:
    """How many ranks of a group work on the same rows.

    of_layer: consecutive ranks, a tensor- or sequence-parallel group. stages: of a pipeline; each has an equal
    consecutive part of all ranks. All peers return the same, so the first one of stage 0 answers.

        8 ranks, 2 of a layer, 2 stages: shard 0 is {0, 1, 4, 5}, shard 1 is {2, 3, 6, 7}; ranks 0 and 2 answer
    """

    of_layer: int = 1
    stages: int = 1

    @property
    def number(self) -> int:
        """Ranks that work on the same rows."""
        return self.of_layer * self.stages

    def shard_of(self, rank: int, num_ranks: int) -> int:
        """Return the number of a rank's data-parallel rank."""
        return rank % (num_ranks // self.stages) // self.of_layer

    def first_of(self, shard: int) -> int:
        """Return the rank that answers for a data-parallel rank."""
        return shard * self.of_layer


class WorkerGroup(Generic[W]):
    """The processes of one role, by rank; all of them hold a worker of class W."""

    def __init__(
        self,
        role: str,
        processes: Sequence[ActorHandle[Any]],
        timeout_s: float,
        partition: Partition | None = None,
        meta: Mapping[str, Any] | None = None,
        observations: Observations | None = None,
        ranks: Sequence[int] | None = None,
        attempt: int = 0,
    ) -> None:
        """
        Args:
            timeout_s: time limit of blocking calls, and of a worker's wait for its rows.
            partition: which rank gets which rows in calls that send a table; None: equal contiguous parts.
            meta: entries for the meta_info of every batch that is sent.
            observations: collects the measurements of the processes.
            ranks: of the processes among those of the role, for messages; None: from 0.
            attempt: that calls; a process that a later one has taken over refuses.
        """
        self.role = role
        self._processes = tuple(processes)
        self._timeout_s = timeout_s
        self._partition = partition
        self._meta = dict(meta or {})
        self._observations = observations
        self._peers = Peers()
        self._ranks = tuple(range(len(processes)) if ranks is None else ranks)
        self._unread: frozenset[str] = frozenset()
        self._attempt = attempt

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def num_shards(self) -> int:
        """Number of data-parallel ranks; ranks that compute the model together get the same rows."""
        return len(self) // self._peers.number

    def over(self, partition: Partition) -> WorkerGroup[W]:
        """Return the same group with another `partition` for the rows of tables."""
        return self._with(_partition=partition)

    def using(self, meta: Mapping[str, Any]) -> WorkerGroup[W]:
        """Return the same group, with these entries added to the meta_info of the batches that it sends."""
        return self._with(_meta={**self._meta, **meta})

    def without(self, columns: Iterable[str]) -> WorkerGroup[W]:
        """Return the same group, to which these columns are not sent although its methods may read them."""
        return self._with(_unread=self._unread | set(columns))

    def only(self, *ranks: int) -> WorkerGroup[W]:
        """Return the processes of these ranks as a separate group; they keep their ranks in messages."""
        return self._with(
            _processes=tuple(self._processes[rank] for rank in ranks),
            _partition=None,
            _peers=Peers(),
            _ranks=tuple(self._ranks[rank] for rank in ranks),
        )

    def extended_by(self, other: WorkerGroup[W]) -> WorkerGroup[W]:
        """Return the processes of two groups of one role; those of `other` have the following ranks."""
        return self._with(
            _processes=(*self._processes, *other._processes), _partition=None, _ranks=(*self._ranks, *other._ranks)
        )

    def with_peers(self, num_peers: int, num_stages: int = 1) -> WorkerGroup[W]:
        """Return the same group, in which ranks of the same tensor-, sequence- or pipeline-parallel group are peers.

        Args:
            num_peers: consecutive ranks that compute a layer together.
            num_stages: of a pipeline; a stage is a consecutive part of the ranks.

        Raises:
            ValueError: the number of processes is not a multiple of both together.
        """
        peers = Peers(num_peers, num_stages)
        if len(self) % peers.number:
            raise ValueError(f"{peers.number} peers do not divide the {len(self)} processes of role {self.role}")
        return self._with(_peers=peers)

    def _with(self, **attributes: Any) -> WorkerGroup[W]:
        other = copy.copy(self)
        vars(other).update(attributes)
        return other

    def call(self, method: RemoteMethod[W, Any, Any, C, M], *args: C.args, **kwargs: C.kwargs) -> M:
        """Call a registered method on the ranks. `dispatch.Dispatch` defines the type of the answer.

        Raises:
            ValueError: the arguments do not fit the number of ranks.
            WorkerGroupError: a blocking call failed.
        """
        if method.dispatch.sends_rows:
            return cast(M, self._call_over_rows(method, cast(Table, args[0]), args[1:], kwargs))
        if method.dispatch.sends_one_each:
            return cast(M, self._call_with_one_each(method, cast("Sequence[Any]", args[0]), kwargs))
        ranks = range(1 if method.execute is Execute.RANK_ZERO else len(self))
        refs = [self._send(rank, method, args, kwargs) for rank in ranks]
        merge = _first if method.dispatch is Dispatch.RANK_ZERO else list
        return cast(M, self._answer(method, Future(refs, merge, self._origin(method, tuple(ranks)))))

    def _call_with_one_each(
        self, method: RemoteMethod[W, Any, Any, Any, Any], arguments: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        each = split_all_to_all(arguments, len(self), method.__name__)
        refs = [self._send(rank, method, (mine,), kwargs) for rank, mine in enumerate(each)]
        return self._answer(method, Future(refs, list, self._origin(method, tuple(range(len(self))))))

    def _call_over_rows(
        self, method: RemoteMethod[W, Any, Any, Any, Any], table: Table, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        peers = self._peers if method.dispatch.knows_peers else Peers()
        num_shards = len(self) // peers.number
        shares = self._partition or contiguous(len(table), num_shards)
        if len(shares) != num_shards:
            raise ValueError(f"a partition over {len(shares)} ranks for {self.role} with {num_shards} ranks")
        # Ranks without rows are not called: only groups without collectives get such a partition.
        shard_of = {rank: peers.shard_of(rank, len(self)) for rank in range(len(self))}
        ranks = tuple(rank for rank, shard in shard_of.items() if shares[shard].rows)
        reads = None if method.reads is None else method.reads - self._unread
        rows = {shard: table.rows(share, self._meta, reads) for shard, share in enumerate(shares) if share.rows}
        answering = [ranks.index(peers.first_of(shard)) for shard in rows]
        stores = method.dispatch.returns_rows
        refs = [
            self._send(rank, method, (rows[shard_of[rank]], *args), kwargs, stores and at in answering, at in answering)
            for at, rank in enumerate(ranks)
        ]
        origin = self._origin(method, ranks)
        if not stores:
            return self._answer(
                method, Future(refs, lambda found: merge_metrics([found[at] for at in answering]), origin)
            )
        joined = Table.of_results([refs[at] for at in answering], [shares[shard] for shard in rows])
        return self._answer(method, TableFuture(refs, joined, origin, answering))

    def _send(
        self,
        rank: int,
        method: RemoteMethod[W, Any, Any, Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        stores: bool = False,
        is_wanted: bool = True,
    ) -> ObjectRef[Any]:
        about = (stores, current_phase(), is_wanted, self._attempt)
        sent: Any = self._processes[rank].execute.remote(method, args, dict(kwargs), *about)
        answer, observed = cast("list[ObjectRef[Any]]", sent)
        if self._observations is not None:
            self._observations.add(observed)
        return answer

    def _answer(self, method: RemoteMethod[W, Any, Any, Any, Any], future: Future[Any]) -> Any:
        return future.result(self._timeout_s) if method.blocking else future

    def _origin(self, method: RemoteMethod[W, Any, Any, Any, Any], ranks: tuple[int, ...]) -> Origin:
        return Origin(self.role, method.__name__, tuple(self._ranks[rank] for rank in ranks))

    def addresses(self) -> Future[list[str]]:
        """Return each process's address, once all of them are up."""
        return self._addresses("start")

    def is_there(self) -> Future[list[str]]:
        """Return a future that completes when all processes have answered; it fails with the reason if one was lost."""
        return self._addresses("an earlier phase")

    def _addresses(self, when: str) -> Future[list[str]]:
        refs = [process.address.remote() for process in self._processes]
        return Future(refs, list, Origin(self.role, when, self._ranks))

    def kill(self) -> None:
        """Terminate all processes of the group at once; they write nothing more."""
        for process in self._processes:
            ray.kill(process)


def _first(answers: list[Any]) -> Any:
    return answers[0]
