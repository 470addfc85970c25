"""Rollout engines in virtual time whose responses each take their own time, some at a time; dynamic sampling uses them.

Unlike `fake_engines`, an engine answers after a while though too little is finished, as a real replica does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.unit.trainer.controller.fake_engines import FakeCapacity, FakeDrafts, FakeReport, FakeRollout
from tests.unit.trainer.controller.fake_world import FakeBatch, World, number_of

PATIENCE_S = 1.0


@dataclass
class TimedRollouts:
    """Engines that compute `num_slots` responses at a time. seconds: of a response, by step, prompt and sample.

    busy_s: seconds in which each slot computed a response, of all slots together.
    """

    world: World
    num_engines: int
    num_slots: int
    seconds: Callable[[int, int, int], float]
    busy_s: float = 0.0
    num_lost: int = 0
    comes_back: bool = False

    def __post_init__(self) -> None:
        self.world.admissions[:] = [lambda: self.num_engines]

    @property
    def engines(self) -> dict[int, FakeCapacity]:
        return dict.fromkeys(range(self.num_engines), FakeCapacity(self.num_slots))

    def begin(self, step: int, *, is_validation: bool) -> TimedGenerating:
        return TimedGenerating(self, step, is_validation)

    def take_drafts(self) -> FakeDrafts:
        return FakeDrafts()

    def joined(self, batch: FakeBatch) -> FakeRollout:
        return FakeRollout(batch, (4,) * len(batch), (8,) * len(batch))


@dataclass
class _Engine:
    """tasks: of the responses that are not reported. finished: rows that are not reported."""

    slots: asyncio.Semaphore
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class TimedGenerating:
    def __init__(self, rollouts: TimedRollouts, step: int, is_validation: bool) -> None:
        self._rollouts, self._step, self._is_validation = rollouts, step, is_validation
        self._engines = {n: _Engine(asyncio.Semaphore(rollouts.num_slots)) for n in rollouts.engines}
        self._prompts: dict[int, tuple[int, int]] = {}
        self._weights = rollouts.world.rollout

    async def exchange(self, engine: int, rows: Sequence[int], prompts: FakeBatch | None, num_rows: int) -> FakeReport:
        mine = self._engines[engine]
        if prompts is not None:
            of_rows = prompts.rows or [(0, row) for row in rows]
            self._prompts |= dict(zip(rows, of_rows, strict=True))
            mine.tasks += [asyncio.create_task(self._write(mine, row)) for row in rows]
        patience = asyncio.create_task(self._rollouts.world.time.sleep(PATIENCE_S))
        while len(mine.finished) < num_rows and not patience.done():
            mine.changed.clear()
            waiting = asyncio.create_task(mine.changed.wait())
            await asyncio.wait([patience, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        patience.cancel()
        if len(mine.finished) < num_rows:
            return FakeReport()
        found, mine.finished = mine.finished, []
        assert self._rollouts.world.rollout == self._weights, "the engines got other weights while they generated"
        known = tuple(self._prompts[row] for row in found)
        of_what = "validation" if self._is_validation else self._step
        return FakeReport(found, FakeBatch(len(found), {"response": number_of(of_what, self._weights)}, known))

    async def _write(self, mine: _Engine, row: int) -> None:
        rollouts, seconds = self._rollouts, self._rollouts.seconds(self._step, *self._prompts[row])
        async with mine.slots:
            start = rollouts.world.time.now
            try:
                await rollouts.world.time.sleep(seconds)
            finally:
                rollouts.busy_s += rollouts.world.time.now - start
        mine.finished.append(row)
        mine.changed.set()

    async def abort(self) -> None:
        for engine in self._engines.values():
            for task in engine.tasks:
                task.cancel()
            await asyncio.gather(*engine.tasks, return_exceptions=True)

    async def end(self) -> None:
        assert all(task.done() for engine in self._engines.values() for task in engine.tasks), "something is generated"


def uneven(seed: int, mean_s: float = 10.0) -> Callable[[int, int, int], float]:
    """Return times of responses with a long tail: a quarter of the mean to four times of it."""

    def seconds(step: int, prompt: int, sample: int) -> float:
        return mean_s * 4.0 ** random.Random(f"{seed}/{step}/{prompt}/{sample}").uniform(-1, 1)

    return seconds
