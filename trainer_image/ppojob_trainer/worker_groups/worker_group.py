"""A role's processes as one thing to call.

`WorkerGroup.call(ActorWorker.update_actor, table)` splits the arguments as the method's dispatch mode says, sends
each rank its part, and returns a future of the merged answer. Made by the roles' groups at start; it never computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from ppojob_trainer.worker_groups.dispatch import Dispatch, Execute, RemoteMethod, merge_metrics, split_all_to_all
from ppojob_trainer.worker_groups.futures import Future, Origin, TableFuture
from ppojob_trainer.worker_groups.partition import Partition, contiguous
from ppojob_trainer.worker_groups.table import Table

__all__ = ["WorkerGroup"]

W = TypeVar("W")
C = ParamSpec("C")
M = TypeVar("M")


class WorkerGroup(Generic[W]):
    """The processes of one role, by rank; all of them hold a worker of class W."""

    def __init__(
        self,
        role: str,
        processes: Sequence[ActorHandle[Any]],
        timeout_s: float,
        partition: Partition | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            timeout_s: limit of blocking calls, and of a worker's wait for the rows it is sent.
            partition: which rank gets which rows in calls that send a table; None: equal contiguous parts.
            meta: entries for the meta_info of every batch that is sent.
        """
        self.role = role
        self._processes = tuple(processes)
        self._timeout_s = timeout_s
        self._partition = partition
        self._meta = dict(meta or {})

    def __len__(self) -> int:
        return len(self._processes)

    def over(self, partition: Partition) -> WorkerGroup[W]:
        """Return the same group, which sends the rows of tables as `partition` says."""
        return WorkerGroup(self.role, self._processes, self._timeout_s, partition, self._meta)

    def using(self, meta: Mapping[str, Any]) -> WorkerGroup[W]:
        """Return the same group, which adds these entries to the meta_info of the batches that it sends."""
        return WorkerGroup(self.role, self._processes, self._timeout_s, self._partition, {**self._meta, **meta})

    def call(self, method: RemoteMethod[W, Any, Any, C, M], *args: C.args, **kwargs: C.kwargs) -> M:
        """Call a registered method on the ranks. What comes back is the method's affair: see `dispatch.Dispatch`.

        Raises:
            ValueError: arguments that do not fit the number of ranks.
            WorkerGroupError: a blocking call failed.
        """
        if method.dispatch.sends_rows:
            return cast(M, self._call_over_rows(method, cast(Table, args[0]), args[1:], kwargs))
        ranks = range(1 if method.execute is Execute.RANK_ZERO else len(self))
        if method.dispatch.sends_one_each:
            each = split_all_to_all(cast("Sequence[Any]", args[0]), len(self), method.__name__)
            refs = [self._send(rank, method, (each[rank],), kwargs) for rank in ranks]
        else:
            refs = [self._send(rank, method, args, kwargs) for rank in ranks]
        merge = _first if method.dispatch is Dispatch.RANK_ZERO else list
        return cast(M, self._answer(method, Future(refs, merge, self._origin(method, tuple(ranks)))))

    def _call_over_rows(
        self, method: RemoteMethod[W, Any, Any, Any, Any], table: Table, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        shares = self._partition or contiguous(len(table), len(self))
        if len(shares) != len(self):
            raise ValueError(f"a partition over {len(shares)} ranks for {self.role} with {len(self)} ranks")
        # A rank without rows is left out: only groups without collectives get such a partition.
        ranks = tuple(rank for rank, share in enumerate(shares) if share.rows)
        refs = [
            self._send(rank, method, (table.rows(shares[rank], self._meta), *args), kwargs, returns_rows(method))
            for rank in ranks
        ]
        origin = self._origin(method, ranks)
        if method.dispatch is Dispatch.DP_COMPUTE_METRIC:
            return self._answer(method, Future(refs, merge_metrics, origin))
        joined = Table.of_results(refs, [shares[rank] for rank in ranks])
        return self._answer(method, TableFuture(refs, joined, origin))

    def _send(
        self,
        rank: int,
        method: RemoteMethod[W, Any, Any, Any, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        stores: bool = False,
    ) -> ObjectRef[Any]:
        return cast("ObjectRef[Any]", self._processes[rank].execute.remote(method, args, dict(kwargs), stores))

    def _answer(self, method: RemoteMethod[W, Any, Any, Any, Any], future: Future[Any]) -> Any:
        return future.result(self._timeout_s) if method.blocking else future

    def _origin(self, method: RemoteMethod[W, Any, Any, Any, Any], ranks: tuple[int, ...]) -> Origin:
        return Origin(self.role, method.__name__, ranks)

    def addresses(self) -> Future[list[str]]:
        """Return each process's address, once all of them are up."""
        refs = [process.address.remote() for process in self._processes]
        return Future(refs, list, Origin(self.role, "start", tuple(range(len(self)))))

    def kill(self) -> None:
        """End all processes of the group at once; they write nothing more."""
        for process in self._processes:
            ray.kill(process)


def returns_rows(method: RemoteMethod[W, Any, Any, Any, Any]) -> bool:
    """Whether the method's answer stays in the worker's object store."""
    return method.dispatch is Dispatch.DP_COMPUTE_PROTO


def _first(answers: list[Any]) -> Any:
    return answers[0]
