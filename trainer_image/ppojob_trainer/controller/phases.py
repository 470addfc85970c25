"""Times the phases of a run: each has a time limit and leaves a record; the idle time is computed from the records.

`ppo` and `loop` make each call on a port through `Phases.run`, or through `Phases.run_alone` if the phases of a pool
take turns. The arithmetic on records is pure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from ppojob_trainer.controller.errors import PhaseTimeoutError
from ppojob_trainer.telemetry.current_phase import CurrentPhase, within_phase

__all__ = ["Phase", "PhaseRecord", "Phases", "busy_seconds", "window_metrics"]

T = TypeVar("T")


@dataclass(frozen=True)
class PhaseRecord:
    """One finished phase; start and end in seconds since the epoch."""

    phase: str
    role: str
    pool: str
    step: int
    start: float
    end: float


class Trace(Protocol):
    """Receives each phase when it is over."""

    def record(self, name: str, *, pool: str, role: str, start: float, end: float, step: int) -> None:
        """Record a phase."""
        ...


class Phase:
    """Names of phases, as in `timing_s/<phase>`; verl's name if verl has the phase."""

    CHECK = "check"
    LOAD = "load"
    CONNECT_WEIGHTS = "connect_weights"
    LOAD_CHECKPOINT = "load_checkpoint"
    EXPORT = "export"
    DATA = "data"
    GENERATE = "gen"
    REWARD = "reward"
    REWARD_MODEL = "reward_model"
    OLD_LOG_PROB = "old_log_prob"
    REF = "ref"
    VALUES = "values"
    ADVANTAGES = "adv"
    UPDATE_CRITIC = "update_critic"
    UPDATE_ACTOR = "update_actor"
    UPDATE_WEIGHTS = "update_weights"
    SAVE_CHECKPOINT = "save_checkpoint"
    VALIDATE = "testing"


class Phases:
    """Runs phases, and keeps their records until `forget`."""

    def __init__(
        self,
        pool_of: Mapping[str, str],
        timeout_s: float,
        trace: Trace | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            pool_of: pool of each role that keeps a pool's GPUs busy.
            timeout_s: time limit of each phase.
        """
        self._pool_of = dict(pool_of)
        self._turns = {pool: asyncio.Lock() for pool in self._pool_of.values()}
        self._timeout_s = timeout_s
        self._trace = trace
        self._clock = clock
        self._records: list[PhaseRecord] = []
        self._running: dict[int, list[PhaseRecord]] = {}
        self._count = 0

    async def run(self, phase: str, role: str, step: int, work: Awaitable[T], *, also: Sequence[str] = ()) -> T:
        """Await `work` and record its start and end.

        Args:
            also: further roles whose pools the work keeps busy.

        Raises:
            PhaseTimeoutError: it was not done in time.
        """
        self._count += 1
        number, pools = self._count, {each: self._pool_of.get(each, "") for each in (role, *also)}
        start = self._clock()
        self._running[number] = [PhaseRecord(phase, each, pool, step, start, start) for each, pool in pools.items()]
        current = CurrentPhase(phase, role, step, deadline=start + self._timeout_s)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                with within_phase(current):
                    return await work
        except TimeoutError as error:
            if limit.expired():
                raise PhaseTimeoutError(phase, role, self._timeout_s, current.unanswered) from error
            raise
        finally:
            for record in self._running.pop(number):
                self._note(replace(record, end=self._clock()))

    async def run_alone(
        self, phase: str, role: str, step: int, work: Coroutine[Any, Any, T], *, also: Sequence[str] = ()
    ) -> T:
        """Do the same as `run`, after all earlier requests for the pools of its roles; its time and limit start then.

        Every phase requests its pools in the same order and its work requests no others, so there is no deadlock.

        Raises:
            PhaseTimeoutError: it was not done in time.
        """
        try:
            async with AsyncExitStack() as turns:
                for pool in sorted({self._pool_of[each] for each in (role, *also) if each in self._pool_of}):
                    await turns.enter_async_context(self._turns[pool])
                return await self.run(phase, role, step, work, also=also)
        finally:
            # A caller that was cancelled while it waited has not started it.
            work.close()

    def _note(self, record: PhaseRecord) -> None:
        self._records.append(record)
        if self._trace is not None:
            self._trace.record(
                record.phase, pool=record.pool, role=record.role, start=record.start, end=record.end, step=record.step
            )

    def now(self) -> float:
        """Return the time of this clock."""
        return self._clock()

    def timings(self, step: int) -> dict[str, float]:
        """Return `timing_s/<phase>` of a step's finished phases: the seconds in which any part of the phase ran."""
        mine = [record for record in self._records if record.step == step]
        return {
            f"timing_s/{phase}": busy_seconds((record.start, record.end) for record in mine if record.phase == phase)
            for phase in dict.fromkeys(record.phase for record in mine)
        }

    def close_window(self, start: float, end: float) -> dict[str, float]:
        """Return `window_metrics` from `start` to `end`, running phases included."""
        running = [replace(record, end=end) for records in self._running.values() for record in records]
        return window_metrics([*self._records, *running], sorted(set(self._pool_of.values())), start, end)

    def forget(self, step: int) -> None:
        """Drop the records of steps up to `step`."""
        self._records = [record for record in self._records if record.step > step]


def window_metrics(records: Sequence[PhaseRecord], pools: Sequence[str], start: float, end: float) -> dict[str, float]:
    """Return how busy the pools were from `start` to `end`, in seconds.

    pool/<name>/busy_fraction: share of the time in which some phase of the pool ran. pool/<name>/idle_s: the remaining
    seconds. overlap/saved_s: the sum of the phases' durations minus the time in which any of them ran; a phase that
    runs in several pools counts once. overlap/idle_fraction: share of the time in which no phase ran.
    """
    inside = [
        replace(record, start=max(record.start, start), end=min(record.end, end))
        for record in records
        if record.end > start and record.start < end
    ]
    length = max(end - start, 1e-9)
    metrics: dict[str, float] = {}
    for name in pools:
        busy = busy_seconds((record.start, record.end) for record in inside if record.pool == name)
        metrics[f"pool/{name}/busy_fraction"] = min(1.0, busy / length)
        metrics[f"pool/{name}/idle_s"] = max(0.0, length - busy)
    spans_of: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for record in inside:
        spans_of.setdefault((record.phase, record.step), []).append((record.start, record.end))
    spans = [span for found in spans_of.values() for span in found]
    any_busy = busy_seconds(spans)
    metrics["overlap/saved_s"] = sum(busy_seconds(found) for found in spans_of.values()) - any_busy
    metrics["overlap/idle_fraction"] = max(0.0, 1.0 - any_busy / length)
    return metrics


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
