"""The fake models of a run, its virtual time, and all that happened; batches that are numbers.

A fake model is one number; an update changes it by what is in the batch. So a phase that runs on the wrong weights, or
before its input is there, changes the numbers that the tests compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.unit.trainer.controller.virtual_time import VirtualTime

# Seconds of virtual time. Generation is longest, the critic's update outlasts the actor's and the push together.
DURATIONS = {
    "prompts": 0.1,
    "generate": 10.0,
    "validate": 4.0,
    "generate_shared": 10.0,
    "validate_shared": 4.0,
    "judge": 1.0,
    "judge_copy": 1.0,
    "old_log_prob": 3.0,
    "values": 2.0,
    "ref": 1.0,
    "ref_copy": 1.0,
    "reward": 2.5,
    "reward_model": 1.5,
    "reward_model_copy": 1.5,
    "hook_Generate": 0.5,
    "hook_Score": 0.5,
    "hook_Step": 3.0,
    "advantages": 0.5,
    "update_actor": 5.0,
    "update_critic": 8.0,
    "push": 1.0,
    "save": 2.0,
    "export": 1.0,
}
NUM_ROWS = 2
"""Rows of every whole batch, unless a test sets others (`World.num_rows`)."""


@dataclass(frozen=True)
class FakeBatch:
    """Rows with columns; a column is one number. rows: the prompt and the sample of each row, if a test reads them."""

    num_rows: int
    columns: Mapping[str, float]
    rows: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return self.num_rows

    def union(self, *others: FakeBatch) -> FakeBatch:
        merged = dict(self.columns)
        for other in others:
            merged |= other.columns
        return FakeBatch(self.num_rows, merged, self.rows)

    def replaced_by(self, other: FakeBatch) -> FakeBatch:
        return FakeBatch(self.num_rows, {**self.columns, **other.columns}, self.rows)

    def take(self, rows: Sequence[int]) -> FakeBatch:
        return FakeBatch(len(rows), self.columns, tuple(self.rows[row] for row in rows) if self.rows else ())

    def join_rows(self, others: Sequence[FakeBatch], numbers: Sequence[int]) -> FakeBatch:
        assert sorted(numbers) == list(range(sum(map(len, (self, *others)))))
        # The real table joins the sources of its parts by position.
        assert all(list(other.columns) == list(self.columns) for other in others), [other.columns for other in others]
        rows = [row for batch in (self, *others) for row in batch.rows]
        return FakeBatch(len(numbers), self.columns, tuple(rows[numbers.index(n)] for n in range(len(rows))))


@dataclass(frozen=True)
class Loss:
    """The end of an engine, some seconds after an exchange began, by default the first of the step."""

    after_s: float
    loses_rows: bool = False
    failure: Exception = field(default_factory=lambda: RuntimeError("rollout rank 0 was lost"))
    exchange: int = 1
    is_validation: bool = False


@dataclass
class World:
    """The fake models and all that happened, as (time, what, 'start' or 'end')."""

    time: VirtualTime = field(default_factory=VirtualTime)
    durations: dict[str, float] = field(default_factory=lambda: dict(DURATIONS))
    failing: dict[str, Exception] = field(default_factory=dict)
    """What ends with an error: a phase of all steps (`ref`), or of one (`ref 3`)."""
    events: list[tuple[float, str, str]] = field(default_factory=list)
    actor: float = 1.0
    critic: float = 2.0
    rollout: float = 1.0
    version: int = 0
    """Of the engines' weights."""
    compared_version: int | None = None
    in_flight: bool = False
    """Whether engines pause for a push, and generate on afterwards."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each push in flight."""
    generated: dict[int, float] = field(default_factory=dict)
    """The engines' weights with which the responses of each step were generated."""
    trained: list[tuple[int, int]] = field(default_factory=list)
    """Step and prompts of each update of the actor; 0: the prompts of dynamic sampling, which `rows` names."""
    actors: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    """The actor's weights after each step."""
    num_rows: int = NUM_ROWS
    engines_sleep: bool = False
    are_lengths_equal: bool = False
    """Whether all rows that an engine gets at once are written at the same time."""
    share_of_mixed: float = 0.5
    asleep: set[str] = field(default_factory=set)
    losses: dict[tuple[str, int, int], Loss] = field(default_factory=dict)
    """The engines that are lost: suffix of the pool, number, step."""
    joins: dict[str, list[float]] = field(default_factory=dict)
    """When new engines are ready: by the suffix of their pool. The next push admits them."""
    admissions: list[Callable[[], int]] = field(default_factory=list)
    """Of each pool; they return how many engines it has."""
    written: list[tuple[str, int, int, Sequence[int]]] = field(default_factory=list)
    """What the engines reported: suffix of the pool, number, step, rows."""

    async def phase(self, what: str, step: int = 0, num_rows: int | None = None) -> None:
        """Take a phase's time, for a part of the rows its share."""
        name = f"{what} {step}" if step else what
        self.events.append((self.time.now, name, "start"))
        seconds = self.durations[what] * (1.0 if num_rows is None else num_rows / self.num_rows)
        await self.generating(self.time.now, seconds, pauses="generate" in what)
        for failing in (what, name):
            if failing in self.failing:
                raise self.failing[failing]
        self.events.append((self.time.now, name, "end"))

    async def generating(self, start: float, seconds: float, *, pauses: bool = True) -> None:
        """Wait until an engine that began at `start` has generated for so many seconds."""
        while True:
            paused = sum(max(0.0, min(end, self.time.now) - max(begin, start)) for begin, end in self.pauses if pauses)
            running = [end - self.time.now for begin, end in self.pauses if pauses and begin <= self.time.now < end]
            left = max([start + seconds + paused - self.time.now, *running])
            if left <= 1e-9:
                return
            await self.time.sleep(left)

    def at(self, name: str, edge: str) -> float:
        """Return when a phase started or ended."""
        return next(time for time, what, found in self.events if (what, found) == (name, edge))

    def names(self, edge: str = "start") -> list[str]:
        """Return the phases in the order in which they started (or ended)."""
        return [what for _, what, found in self.events if found == edge]

    def overlap(self, one: str, other: str) -> bool:
        """Whether two phases ran at the same time for a while."""
        return self.at(one, "start") < self.at(other, "end") and self.at(other, "start") < self.at(one, "end")


def number_of(*inputs: object) -> float:
    """Return a number from 0 to 1 that depends on all inputs."""
    digest = hashlib.sha256(repr(inputs).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32
