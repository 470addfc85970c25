"""The processes that run a reward function, as their parent sees them: who has which response, and until when.

A plain function has `concurrency` processes with one response each. A coroutine function has one process with up to
`concurrency` responses. A process with a response beyond its limit is ended by SIGKILL and replaced. If several
responses were in it, each of them is scored again alone, so that the one at fault is known. Called by `scorer`.

Own code, because the process pools of libraries give a process one task at a time, import the parent's main module
(in a Ray worker: all of Ray) and send SIGTERM first.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Generator, Sequence
from multiprocessing.connection import wait

from ppojob_trainer.rewards.errors import RewardImportError, RewardProcessError, RewardRefusedError
from ppojob_trainer.rewards.interface import ScoreItem
from ppojob_trainer.rewards.loader import FunctionSource
from ppojob_trainer.rewards.scoring.child_process import ChildProcess
from ppojob_trainer.rewards.scoring.messages import Answer, Ready, Refused, Setup

DEFAULT_CALLS = 64
"""Calls of a coroutine function at the same time, where `concurrency` is not set."""
START_LIMIT_S = 300.0
"""Longest time for a process to start and to import the function."""
GRACE_S = 5.0
"""A coroutine's limit is kept by its own process. After this time more, the event loop itself hangs."""
MAX_FAILED_STARTS = 3
_LONGEST_WAIT_S = 0.5
_NUM_STACKS = 3


class Processes:
    """Scores responses with one function."""

    def __init__(self, source: FunctionSource, *, timeout_seconds: float, concurrency: int | None = None) -> None:
        """
        Args:
            timeout_seconds: for one response.
            concurrency: responses at the same time; None: 1, or `DEFAULT_CALLS` of a coroutine function.
        """
        self._source = source
        self._timeout_seconds = timeout_seconds
        self._concurrency = concurrency
        self._is_async = False
        self._children: list[ChildProcess] = []
        self._failed_starts = 0
        self._stacks_left = _NUM_STACKS

    def start(self, data_sources: Sequence[str] | None = None) -> None:
        """Start all processes and wait until the function can be called.

        Args:
            data_sources: names of the data sets, for the function's own check; None: there is no check.

        Raises:
            RewardImportError: the function cannot be imported.
            RewardRefusedError: its own check refuses its arguments or the data sets.
        """
        first = self._new_child(None if data_sources is None else tuple(data_sources))
        message = first.receive(START_LIMIT_S)
        if not isinstance(message, Ready):
            first.end()
        match message:
            case Refused(message=text, is_import=is_import):
                raise RewardImportError(text) if is_import else RewardRefusedError(text)
            case Ready(is_async=is_async):
                self._is_async, first.is_ready = is_async, True
            case _:
                raise RewardImportError(
                    f"reward.function ({self._source.where}): its process {first.ending or 'did not finish importing'} "
                    f"(limit {START_LIMIT_S:g} s). Import it in the trainer's image to see why"
                )
        number = 1 if is_async else self._concurrency or 1
        self._children = [first, *(self._new_child() for _ in range(number - 1))]

    def close(self) -> None:
        """End all processes."""
        for child in self._children:
            child.end()
        self._children = []

    def score(self, items: Sequence[ScoreItem]) -> Generator[Answer, None, None]:
        """Yield an answer for each item, as they come; its number is the item's place.

        Raises:
            RewardProcessError: a process that ended could not be started again.
        """
        batch = _Batch(items)
        try:
            while batch.num_left:
                for child in self._children:
                    self._hand_out(batch, child)
                for answer in self._collect(batch):
                    batch.num_left -= 1
                    yield answer
        finally:
            # Where nobody waits for the rest, what still runs must not answer the next batch.
            self._children = [self._replaced(child) if child.deadlines else child for child in self._children]

    @property
    def _num_calls(self) -> int:
        """Responses in one process at the same time."""
        return (self._concurrency or DEFAULT_CALLS) if self._is_async else 1

    @property
    def _limit_s(self) -> float:
        return self._timeout_seconds + (GRACE_S if self._is_async else 0.0)

    def _hand_out(self, batch: _Batch, child: ChildProcess) -> None:
        while child.is_ready and len(child.deadlines) < self._num_calls and not child.is_alone:
            number = batch.next_for(child)
            if number is None:
                return
            child.send(number, pickle.dumps(batch.items[number]), time.monotonic() + self._limit_s)

    def _collect(self, batch: _Batch) -> list[Answer]:
        """Wait for messages, or for the next limit; return what became of some responses."""
        answers: list[Answer] = []
        by_connection = {child.connection: child for child in self._children}
        nearest = min(min(child.deadlines.values(), default=float("inf")) for child in self._children)
        for connection in wait(list(by_connection), min(_LONGEST_WAIT_S, max(0.0, nearest - time.monotonic()))):
            answers += self._receive(by_connection[connection], batch)  # type: ignore[index]
        for child in list(self._children):
            answers += self._check_limits(child, batch)
        return answers

    def _receive(self, child: ChildProcess, batch: _Batch) -> list[Answer]:
        message = child.receive(0.0)
        if isinstance(message, Answer):
            return [child.settle(message)]
        if isinstance(message, Ready):
            child.is_ready, self._failed_starts = True, 0
            return []
        if not child.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                text = message.message if isinstance(message, Refused) else f"the process {child.ending}"
                raise RewardProcessError(f"a process of the reward function cannot be started again: {text}")
        self._replace(child)
        numbers = list(child.deadlines)
        if len(numbers) == 1:
            return [Answer(numbers[0], error=f"the process of the reward function {child.ending}")]
        batch.alone.extend(numbers)
        return []

    def _check_limits(self, child: ChildProcess, batch: _Batch) -> list[Answer]:
        now = time.monotonic()
        if not child.is_ready and now > child.started + START_LIMIT_S:
            raise RewardProcessError(
                f"a process of the reward function did not start again within {START_LIMIT_S:g} s: the host may lack "
                "memory or processor time"
            )
        late = [number for number, deadline in child.deadlines.items() if now > deadline]
        if not late:
            return []
        if self._stacks_left:
            self._stacks_left -= 1
            child.print_stack()
        self._replace(child)
        if len(child.deadlines) == 1:
            return [Answer(late[0], error="timeout", is_timeout=True)]
        batch.alone.extend(late)
        batch.waiting.extendleft(sorted(child.deadlines.keys() - set(late), reverse=True))
        return []

    def _replace(self, child: ChildProcess) -> None:
        self._children[self._children.index(child)] = self._replaced(child)

    def _replaced(self, child: ChildProcess) -> ChildProcess:
        child.end()
        return self._new_child()

    def _new_child(self, data_sources: tuple[str, ...] | None = None) -> ChildProcess:
        return ChildProcess(Setup(self._source, self._timeout_seconds, data_sources))


class _Batch:
    """The responses of a batch that are still to be scored: `waiting`, and `alone` those that need an own process."""

    def __init__(self, items: Sequence[ScoreItem]) -> None:
        self.items = items
        self.num_left = len(items)
        self.waiting = deque(range(len(items)))
        self.alone: deque[int] = deque()

    def next_for(self, child: ChildProcess) -> int | None:
        """Return the number of the next response for a process that has room; None: there is none now."""
        if self.alone:
            if child.deadlines:
                return None
            child.is_alone = True
            return self.alone.popleft()
        return self.waiting.popleft() if self.waiting else None
