"""Pending answers: the controller awaits them, or passes them to another group unresolved.

Created by `worker_group`. A future knows whose answer it waits for, and turns Ray's errors into this package's. If
several ranks fail, it raises the failure that explains the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from ppojob_trainer.telemetry import current_phase
from ppojob_trainer.worker_groups.communication import is_of_communication
from ppojob_trainer.worker_groups.errors import (
    CallTimeoutError,
    WorkerFailedError,
    WorkerGroupError,
    WorkerLostError,
    WorkerOutOfMemoryError,
)
from ppojob_trainer.worker_groups.memory import explain_memory
from ppojob_trainer.worker_groups.stored_rows import StoredRows
from ppojob_trainer.worker_groups.table import Table

__all__ = ["Future", "Origin", "TableFuture", "rank_of_explanation"]

T = TypeVar("T")

# When one rank fails, the others fail in their collectives shortly after, or before Ray reports that it exited.
GRACE_S = 5.0


@dataclass(frozen=True)
class Origin:
    """Whose answer it is: role, method, and the rank of each part."""

    role: str
    method: str
    ranks: tuple[int, ...]


class Future(Generic[T]):
    """The merged answer of a call on several ranks."""

    def __init__(self, refs: Sequence[ObjectRef[Any]], merge: Callable[[list[Any]], T], origin: Origin) -> None:
        self._refs = tuple(refs)
        self._merge = merge
        self._origin = origin

    def __await__(self) -> Generator[Any, None, T]:
        return self._gather().__await__()

    def result(self, timeout_s: float) -> T:
        """Block until the answer arrives.

        Raises:
            CallTimeoutError: it did not arrive in time.
            WorkerGroupError: a rank failed.
        """
        rank_of = dict(zip(self._refs, self._origin.ranks, strict=True))
        deadline = time.monotonic() + timeout_s
        waiting = list(self._refs)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(str(rank_of[ref]) for ref in waiting)
                words = f"{self._name} did not answer within {timeout_s:g} s; waiting for rank {late}"
                raise CallTimeoutError(words).of(self._origin.role)
            self._raise_if_failed(ready[0], rank_of[ready[0]])
        return self._merge(ray.get(list(self._refs)))

    def _raise_if_failed(self, ref: ObjectRef[Any], rank: int) -> None:
        try:
            ray.get(ref)
        except Exception as error:  # noqa: BLE001 - any exception of a worker's own code arrives here, under its own class
            failure = self._explain(error, rank)
            raise failure from failure.__cause__

    async def _gather(self) -> T:
        answers = [asyncio.ensure_future(_wait_for(ref)) for ref in self._refs]
        try:
            await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
            if not any(answer.done() and answer.exception() for answer in answers):
                return self._merge([answer.result() for answer in answers])
            await asyncio.wait(answers, timeout=GRACE_S)
        except asyncio.CancelledError:
            self._note_unanswered([answer.done() for answer in answers])
            raise
        finally:
            # If the caller was cancelled or a rank failed, nobody awaits the others any more.
            for answer in answers:
                answer.cancel()
                answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        failures = [
            self._explain(error, rank)
            for rank, answer in zip(self._origin.ranks, answers, strict=True)
            if answer.done() and not answer.cancelled() and (error := answer.exception()) is not None
        ]
        failure = min(failures, key=rank_of_explanation)
        raise failure from failure.__cause__

    def _note_unanswered(self, is_answered: Sequence[bool]) -> None:
        """Add the unanswered calls to the current phase, for the message of its timeout."""
        phase = current_phase()
        late = [str(rank) for rank, done in zip(self._origin.ranks, is_answered, strict=True) if not done]
        if phase is not None and late:
            phase.unanswered.append(f"{self._name} on rank {', '.join(late)}")

    @property
    def _name(self) -> str:
        return f"{self._origin.role}.{self._origin.method}"

    def _explain(self, error: BaseException, rank: int) -> WorkerGroupError:
        who = f"{self._origin.role} rank {rank}"
        cause = _cause(error)
        # A broken connection only shows that another process exited, not why.
        is_of_a_peer = cause is not error and isinstance(cause, RayError)
        of_memory = None if is_of_a_peer else explain_memory(cause, self._origin.role, rank, self._origin.method)
        explained: WorkerGroupError
        if of_memory is not None:
            explained = of_memory
        elif isinstance(error, RayTaskError):
            explained = WorkerFailedError(
                f"{who} failed in {self._origin.method}: {type(cause).__name__}: {_first_line(cause)}"
            )
        elif isinstance(error, RayActorError) and error.actor_init_failed:
            # Ray passes the traceback as text; its last line is the exception.
            explained = WorkerFailedError(f"{who} could not start: {str(error).strip().splitlines()[-1]}")
        elif isinstance(error, (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError)):
            explained = WorkerLostError(f"{who} was lost during {self._origin.method}: {_first_line(error)}")
        else:
            explained = WorkerFailedError(f"{who} gave no answer to {self._origin.method}: {error}")
        explained.__cause__ = cause
        return explained.of(self._origin.role)


class TableFuture(Future[Table]):
    """A table that is not computed yet. `table` can be passed to another group's call at once."""

    def __init__(
        self,
        refs: Sequence[ObjectRef[StoredRows]],
        table: Table,
        origin: Origin,
        answering: Sequence[int] | None = None,
    ) -> None:
        """Wait for all `refs`; `table` consists of those at `answering`, one for each parallel group. None: of all."""
        super().__init__(refs, self._known, origin)
        self.table = table
        self._answering = range(len(refs)) if answering is None else answering

    def _known(self, stored: list[StoredRows]) -> Table:
        return self.table.known([stored[at] for at in self._answering])


async def _wait_for(ref: ObjectRef[T]) -> T:
    return await ref


def _cause(error: BaseException) -> BaseException:
    """Return the worker's exception without Ray's wrapper, because it names the root cause."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BaseException) else error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def rank_of_explanation(failure: WorkerGroupError) -> int:
    """Rank failures by how much they explain; the lowest is reported when several ranks fail.

    The order is: out of memory (explains a lost process), a named error (explains a lost connection), a lost process,
    an error without a name, a broken connection to another rank.
    """
    if isinstance(failure, WorkerOutOfMemoryError):
        return 0
    if isinstance(failure, WorkerLostError):
        return 2
    if is_of_communication(failure.__cause__):
        return 4
    return 3 if type(failure.__cause__) is RuntimeError else 1
