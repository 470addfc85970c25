"""How a worker's method is called on a group: which rank gets which arguments, and how the answers are merged.

    class CriticWorker:
        @register(dispatch=Dispatch.DP_COMPUTE_PROTO, reads=(Keys.INPUT_IDS, Keys.RESPONSE_MASK))
        def compute_values(self, batch: DataProto) -> DataProto: ...

    future = critics.call(CriticWorker.compute_values, table)

On an instance the method is an ordinary method. On the class it is a `RemoteMethod`, which carries two signatures:
the worker's, and the caller's, which the dispatch mode derives from it. So a call names the method, an editor can jump
to it, and mypy checks the arguments. Worker classes import this module; `worker_group` reads the modes. The functions
that split and merge are pure: they never call Ray.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeAlias, TypeVar, overload

from ppojob_trainer.protocol import DataProto
from ppojob_trainer.worker_groups.futures import Future, TableFuture
from ppojob_trainer.worker_groups.table import Table

__all__ = ["Dispatch", "Execute", "Metrics", "RemoteMethod", "merge_metrics", "register", "split_all_to_all"]

Metrics = Mapping[str, float]
Columns: TypeAlias = Iterable[str] | None

W = TypeVar("W")
W_contra = TypeVar("W_contra", contravariant=True)
A = TypeVar("A")
R = TypeVar("R")
P = ParamSpec("P")
C = ParamSpec("C")
M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)


class Dispatch(Enum):
    """How arguments are split over the ranks and answers are merged.

    In each entry, the arguments are before the arrow and the answer is after it. "Peers" are the ranks of the same
    tensor-, sequence- or pipeline-parallel group. Of a table, only the columns that the method reads are fetched
    (`register`).

    ONE_TO_ALL: the same arguments to all ranks -> a list of answers by rank.
    RANK_ZERO: only to rank 0 -> its answer.
    ALL_TO_ALL: one argument, a list with an entry for each rank -> a list of answers by rank.
    DP_COMPUTE_PROTO: a table, its rows divided over all ranks -> a table with as many rows, in the same order.
    DP_COMPUTE_METRIC: a table, its rows divided over the data-parallel ranks -> metrics, merged by `merge_metrics`.
    MESH_COMPUTE_PROTO: a table, its rows divided over the data-parallel ranks of a device mesh, with the same rows to
        all peers -> a table of the answers of the first of the peers.
    """

    ONE_TO_ALL = "one to all"
    RANK_ZERO = "rank zero"
    ALL_TO_ALL = "all to all"
    DP_COMPUTE_PROTO = "dp compute proto"
    DP_COMPUTE_METRIC = "dp compute metric"
    MESH_COMPUTE_PROTO = "mesh compute proto"

    @property
    def sends_rows(self) -> bool:
        """Whether the first argument is a table."""
        return self.returns_rows or self is Dispatch.DP_COMPUTE_METRIC

    @property
    def returns_rows(self) -> bool:
        """Whether the answer is a table."""
        return self in (Dispatch.DP_COMPUTE_PROTO, Dispatch.MESH_COMPUTE_PROTO)

    @property
    def sends_one_each(self) -> bool:
        """Whether the argument is a list with an entry for each rank."""
        return self is Dispatch.ALL_TO_ALL

    @property
    def knows_peers(self) -> bool:
        """Whether ranks that compute the model together get the same rows, and only the first of them answers."""
        return self in (Dispatch.DP_COMPUTE_METRIC, Dispatch.MESH_COMPUTE_PROTO)


class Execute(Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank zero"


class RemoteMethod(Generic[W_contra, P, R, C, M_co]):
    """A registered method: (W, P) -> R in the worker, C -> M_co for the caller of the group."""

    def __init__(
        self,
        function: Callable[..., Any],
        dispatch: Dispatch,
        execute: Execute,
        blocking: bool,
        reads: frozenset[str] | None = None,
    ) -> None:
        if execute is Execute.RANK_ZERO and dispatch not in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
            raise ValueError(f"{function.__qualname__}: {dispatch} gives work to every rank, so execute must be ALL")
        self.function = function
        self.dispatch = dispatch
        self.execute = Execute.RANK_ZERO if dispatch is Dispatch.RANK_ZERO else execute
        self.blocking = blocking
        self.reads = reads
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        self.__module__ = function.__module__

    @overload
    def __get__(self, instance: None, owner: type) -> RemoteMethod[W_contra, P, R, C, M_co]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else self.function.__get__(instance, owner)

    def __reduce__(self) -> tuple[Callable[[str, str], Any], tuple[str, str]]:
        # Pickled by name: the worker already has the class, and a method pickled by value would be a different object.
        return _find, (self.function.__module__, self.function.__qualname__)

    def __repr__(self) -> str:
        return f"<{self.function.__qualname__}, {self.dispatch.value}>"


def _find(module: str, qualified_name: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in qualified_name.split("."):
        found = getattr(found, name)
    return found


Proto = Literal[Dispatch.DP_COMPUTE_PROTO, Dispatch.MESH_COMPUTE_PROTO]


# fmt: off
@overload
def register(
    *, dispatch: Literal[Dispatch.ONE_TO_ALL], execute: Execute = ..., blocking: Literal[False] = ...,
    reads: Columns = ...,
) -> Callable[[Callable[Concatenate[W, P], R]], RemoteMethod[W, P, R, P, Future[list[R]]]]: ...
@overload
def register(
    *, dispatch: Literal[Dispatch.ONE_TO_ALL], execute: Execute = ..., blocking: Literal[True],
    reads: Columns = ...,
) -> Callable[[Callable[Concatenate[W, P], R]], RemoteMethod[W, P, R, P, list[R]]]: ...
@overload
def register(
    *, dispatch: Literal[Dispatch.RANK_ZERO], execute: Execute = ..., blocking: Literal[False] = ...,
    reads: Columns = ...,
) -> Callable[[Callable[Concatenate[W, P], R]], RemoteMethod[W, P, R, P, Future[R]]]: ...
@overload
def register(
    *, dispatch: Literal[Dispatch.RANK_ZERO], execute: Execute = ..., blocking: Literal[True],
    reads: Columns = ...,
) -> Callable[[Callable[Concatenate[W, P], R]], RemoteMethod[W, P, R, P, R]]: ...
@overload
def register(
    *, dispatch: Literal[Dispatch.ALL_TO_ALL], execute: Execute = ..., blocking: Literal[False] = ...
) -> Callable[[Callable[[W, A], R]], RemoteMethod[W, [A], R, [Sequence[A]], Future[list[R]]]]: ...
@overload
def register(
    *, dispatch: Literal[Dispatch.ALL_TO_ALL], execute: Execute = ..., blocking: Literal[True]
) -> Callable[[Callable[[W, A], R]], RemoteMethod[W, [A], R, [Sequence[A]], list[R]]]: ...
@overload
def register(
    *, dispatch: Proto, execute: Execute = ..., blocking: Literal[False] = ...,
    reads: Columns = ...,
) -> Callable[
    [Callable[Concatenate[W, DataProto, P], DataProto]],
    RemoteMethod[W, Concatenate[DataProto, P], DataProto, Concatenate[Table, P], TableFuture],
]: ...
@overload
def register(
    *, dispatch: Proto, execute: Execute = ..., blocking: Literal[True],
    reads: Columns = ...,
) -> Callable[
    [Callable[Concatenate[W, DataProto, P], DataProto]],
    RemoteMethod[W, Concatenate[DataProto, P], DataProto, Concatenate[Table, P], Table],
]: ...
@overload
def register(
    *, dispatch: Literal[Dispatch.DP_COMPUTE_METRIC], execute: Execute = ..., blocking: Literal[False] = ...,
    reads: Columns = ...,
) -> Callable[
    [Callable[Concatenate[W, DataProto, P], Metrics]],
    RemoteMethod[W, Concatenate[DataProto, P], Metrics, Concatenate[Table, P], Future[dict[str, float]]],
]: ...
@overload
def register(
    *, dispatch: Literal[Dispatch.DP_COMPUTE_METRIC], execute: Execute = ..., blocking: Literal[True],
    reads: Columns = ...,
) -> Callable[
    [Callable[Concatenate[W, DataProto, P], Metrics]],
    RemoteMethod[W, Concatenate[DataProto, P], Metrics, Concatenate[Table, P], dict[str, float]],
]: ...
# fmt: on
def register(
    *,
    dispatch: Dispatch,
    execute: Execute = Execute.ALL,
    blocking: bool = False,
    reads: Columns = None,
) -> Any:
    """Make a method callable on a group.

    Args:
        dispatch: how arguments are split and answers merged.
        execute: which ranks run it; RANK_ZERO only if the arguments are not split.
        blocking: True returns the merged answer, within the group's time limit; False returns a future.
        reads: the columns of the batch that the method reads, if the batch has them; only these are fetched. None: all
            columns.

    Raises:
        ValueError: `dispatch` and `execute` cannot be combined, or `reads` is empty.
    """
    columns = None if reads is None else frozenset(reads)
    if columns is not None and not columns:
        raise ValueError("reads names no column: name those that the method reads, or leave it out for all")
    return lambda function: RemoteMethod(function, dispatch, execute, blocking, columns)


def split_all_to_all(arguments: Sequence[A], num_ranks: int, method: str) -> list[A]:
    """Return the argument of each rank.

    Raises:
        ValueError: the number of arguments is not the number of ranks.
    """
    if len(arguments) != num_ranks:
        raise ValueError(f"{method} takes one argument for each of {num_ranks} ranks, got {len(arguments)}")
    return list(arguments)


def merge_metrics(answers: Sequence[Metrics]) -> dict[str, float]:
    """Merge the metrics of all ranks: the maximum for names that end in `max`, the minimum for `min`, else the mean.

    This is verl's rule. For a mean over tokens, the workers reduce it over all ranks before they answer.
    """
    values: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.items():
            values.setdefault(name, []).append(value)
    return {name: _merge(name, found) for name, found in values.items()}


def _merge(name: str, values: Sequence[float]) -> float:
    if name.endswith("max"):
        return max(values)
    return min(values) if name.endswith("min") else sum(values) / len(values)
