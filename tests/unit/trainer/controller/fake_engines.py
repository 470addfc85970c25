"""Rollout engines without processes, in virtual time; a test can let one be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tests.unit.trainer.controller.fake_world import FakeBatch, World, number_of


@dataclass(frozen=True)
class FakeCapacity:
    num_sequences: int = 1024
    cache_tokens: int = 0


@dataclass(frozen=True)
class FakeReport:
    rows: Sequence[int] = ()
    batch: FakeBatch | None = None
    failure: Exception | None = None
    are_rows_lost: bool = False


@dataclass(frozen=True)
class FakeRollout:
    batch: FakeBatch
    prompt_lengths: Sequence[int] = (4, 6)
    response_lengths: Sequence[int] = (2, 8)

    @property
    def oldest_versions(self) -> Sequence[int]:
        return self._of_each("oldest")

    @property
    def newer_tokens(self) -> Sequence[int]:
        return self._of_each("newer")

    def _of_each(self, column: str) -> Sequence[int]:
        return [int(self.batch.columns[column])] * len(self.batch) if column in self.batch.columns else ()


@dataclass(frozen=True)
class FakeDrafts:
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class FakeRollouts:
    """Engines of a pool. Those of all pools draw the same. What an engine gets at once takes one duration together.

    suffix: of the names of their phases, for a pool that is shared.
    """

    def __init__(self, world: World, suffix: str = "", num_engines: int = 1) -> None:
        self.world, self.suffix = world, suffix
        self.lost: dict[int, Exception] = {}
        self.drafts = FakeDrafts()
        self._num_engines = num_engines
        world.admissions.append(self._admit)

    def _admit(self) -> int:
        ready = [at for at in self.world.joins.get(self.suffix, []) if at <= self.world.time.now]
        for at in ready:
            self.world.joins[self.suffix].remove(at)
        self._num_engines += len(ready)
        return len(self.engines)

    @property
    def engines(self) -> dict[int, FakeCapacity]:
        return {number: FakeCapacity() for number in range(self._num_engines) if number not in self.lost}

    @property
    def comes_back(self) -> bool:
        return self.suffix in self.world.joins

    @property
    def num_lost(self) -> int:
        return len(self.lost)

    def begin(self, step: int, *, is_validation: bool) -> FakeGenerating:
        return FakeGenerating(self, step, is_validation)

    def take_drafts(self) -> FakeDrafts:
        drafts, self.drafts = self.drafts, FakeDrafts()
        return drafts

    def joined(self, batch: FakeBatch) -> FakeRollout:
        return FakeRollout(batch, ((4, 6) * len(batch))[: len(batch)], ((2, 8) * len(batch))[: len(batch)])


@dataclass
class _Writing:
    """A row that is being written; the phase of all that came with it ends at its last row."""

    start: float
    seconds: float
    phase: asyncio.Task[None]
    is_last: bool


class FakeGenerating:
    """The last of several rows is written in half of the time, unless all lengths are equal."""

    def __init__(self, rollouts: FakeRollouts, step: int, is_validation: bool) -> None:
        self._rollouts, self._step, self._is_validation = rollouts, step, is_validation
        self._held: dict[int, dict[int, _Writing]] = {}
        self._num_exchanges: dict[int, int] = {}
        self._prompts: dict[int, tuple[int, int]] = {}
        self._weights, self._version = rollouts.world.rollout, rollouts.world.version

    async def exchange(self, engine: int, rows: Sequence[int], prompts: FakeBatch | None, num_rows: int) -> FakeReport:
        world, suffix = self._rollouts.world, self._rollouts.suffix
        held = self._held.setdefault(engine, {})
        if prompts is not None:
            assert suffix not in world.asleep, "the engine released its weights when it slept"
            assert len(prompts) == len(rows)
            held |= self._begin(rows)
            self._prompts |= dict(zip(rows, prompts.rows, strict=False))
        ends = {row: writing.start + writing.seconds for row, writing in held.items()}
        first = sorted(held, key=lambda row: ends[row])[:num_rows]
        if world.are_lengths_equal and first:
            # Those that are written at the same time are reported together, as the real ones are.
            first = [row for row in held if ends[row] <= ends[first[-1]]]
        self._num_exchanges[engine] = self._num_exchanges.get(engine, 0) + 1
        loss = world.losses.get((suffix, engine, self._step))
        if (
            loss is not None
            and loss.is_validation is self._is_validation
            and loss.exchange == self._num_exchanges[engine]
            and not self._rollouts.lost
        ):
            await world.time.sleep(loss.after_s)
            self._rollouts.lost[engine] = loss.failure
            return FakeReport(failure=loss.failure, are_rows_lost=loss.loses_rows)
        for row in first:
            mine = held[row]
            await (mine.phase if mine.is_last else world.generating(mine.start, mine.seconds))
        assert world.in_flight or world.rollout == self._weights, "the engines got other weights while they generated"
        for row in first:
            del held[row]
        of_what = "validation" if self._is_validation else self._step
        world.written.append((suffix, engine, self._step, first))
        known = tuple(self._prompts[row] for row in first if row in self._prompts)
        columns = {"response": number_of(of_what, self._weights)}
        if world.in_flight:
            newer = world.version - self._version
            columns = {
                "response": number_of(of_what, world.rollout),
                "oldest": self._version,
                "newer": float(newer > 0),
            }
        return FakeReport(first, FakeBatch(len(first), columns, known))

    def _begin(self, rows: Sequence[int]) -> dict[int, _Writing]:
        world, what = self._rollouts.world, "validate" if self._is_validation else "generate"
        name = f"{what}{self._rollouts.suffix}"
        if not self._is_validation:
            world.generated[self._step] = self._weights
        taken = world.durations[name]
        phase = asyncio.create_task(world.phase(name, 0 if self._is_validation else self._step))
        early = rows[-1] if len(rows) > 1 and not world.are_lengths_equal else None
        return {
            row: _Writing(world.time.now, taken / 2 if row == early else taken, phase, row != early) for row in rows
        }

    async def abort(self) -> None:
        self._held.clear()

    async def end(self) -> None:
        if self._rollouts.world.engines_sleep and not self._is_validation:
            self._rollouts.world.asleep.add(self._rollouts.suffix)
