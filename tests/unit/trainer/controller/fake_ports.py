"""Ports without processes: every phase takes virtual time, and every number tells what it was computed from.

A fake model is one number; an update changes it by what is in the batch. So a phase that runs on the wrong weights, or
before its input is there, changes the numbers that the tests compare.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.ports import Metrics, Ports
from tests.unit.trainer.controller.virtual_time import VirtualTime

T = TypeVar("T")

# Seconds of virtual time. Generation is longest, the critic's update outlasts the actor's and the push together.
DURATIONS = {
    "prompts": 0.1,
    "generate": 10.0,
    "validate": 4.0,
    "generate_shared": 10.0,
    "validate_shared": 4.0,
    "judge": 1.0,
    "old_log_prob": 3.0,
    "values": 2.0,
    "ref": 1.0,
    "reward": 2.5,
    "reward_model": 1.5,
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
"""Rows of every whole batch."""


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
        rows = [row for batch in (self, *others) for row in batch.rows]
        return FakeBatch(len(numbers), self.columns, tuple(rows[numbers.index(n)] for n in range(len(rows))))


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
class Loss:
    """The end of an engine, some seconds after an exchange began, by default the first of the step."""

    after_s: float
    loses_rows: bool = False
    failure: Exception = field(default_factory=lambda: RuntimeError("rollout rank 0 was lost"))
    exchange: int = 1


@dataclass(frozen=True)
class FakeSample:
    prompt: int
    num_tokens: int


@dataclass(frozen=True)
class FakePrompts:
    """Each prompt has `NUM_ROWS` samples."""

    batch: FakeBatch
    epoch: int = 0

    @property
    def samples(self) -> list[FakeSample]:
        return [FakeSample(row // NUM_ROWS, 4) for row in range(len(self.batch))]


@dataclass(frozen=True)
class FakeRollout:
    batch: FakeBatch
    prompt_lengths: Sequence[int] = (4, 6)
    response_lengths: Sequence[int] = (2, 8)


@dataclass
class World:
    """The fake models and all that happened, as (time, what, 'start' or 'end')."""

    time: VirtualTime = field(default_factory=VirtualTime)
    durations: dict[str, float] = field(default_factory=lambda: dict(DURATIONS))
    failing: dict[str, Exception] = field(default_factory=dict)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    actor: float = 1.0
    critic: float = 2.0
    rollout: float = 1.0
    generated: dict[int, float] = field(default_factory=dict)
    """The engines' weights with which the responses of each step were generated."""
    trained: list[tuple[int, int]] = field(default_factory=list)
    """Step and prompts of each update of the actor; 0: the prompts of dynamic sampling, which `rows` names."""
    actors: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    """The actor's weights after each step."""
    engines_sleep: bool = False
    share_of_mixed: float = 0.5
    asleep: set[str] = field(default_factory=set)
    losses: dict[tuple[str, int, int], Loss] = field(default_factory=dict)
    """The engines that are lost: suffix of the pool, number, step."""
    written: list[tuple[str, int, int, Sequence[int]]] = field(default_factory=list)
    """What the engines reported: suffix of the pool, number, step, rows."""

    async def phase(self, what: str, step: int = 0, num_rows: int = NUM_ROWS) -> None:
        """Take a phase's time, for a part of the rows its share."""
        name = f"{what} {step}" if step else what
        self.events.append((self.time.now, name, "start"))
        await self.time.sleep(self.durations[what] * num_rows / NUM_ROWS)
        if what in self.failing:
            raise self.failing[what]
        self.events.append((self.time.now, name, "end"))

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


class FakeData:
    def __init__(self, world: World) -> None:
        self.world = world
        self.restored: tuple[int, Mapping[str, Any]] | None = None
        self.position = self.num_kept = 0
        self.positions: dict[int, int] = {0: 0}
        """Prompts that were read up to each step; each batch has the number of the last one in the column `prompt`."""
        self.counts: dict[int, list[int]] = {}
        """For each step, the numbers of prompts that dynamic sampling requested."""

    async def prompts(self, step: int, count: int | None = None) -> FakePrompts:
        await self.world.phase("prompts", step)
        if count is None:
            self.position += 1
            self.positions[step] = self.position
            return FakePrompts(FakeBatch(2, {"step": step, "prompt": self.position}))
        self.counts.setdefault(step, []).append(count)
        prompts = range(self.position, self.position + count)
        self.position = self.positions[step] = self.position + count
        rows = tuple((prompt, sample) for prompt in prompts for sample in range(NUM_ROWS))
        return FakePrompts(FakeBatch(len(rows), {"step": step}, rows))

    async def validation_prompts(self) -> FakePrompts:
        return FakePrompts(FakeBatch(2, {"validation": 1.0}))

    async def keep(self, batch: FakeBatch) -> FakeBatch:
        self.num_kept += 1
        return batch

    async def state(self, step: int) -> Mapping[str, Any]:
        return {"position": self.positions[step]}

    async def restore(self, step: int, state: Mapping[str, Any]) -> None:
        self.restored = (step, state)
        self.position = self.positions[step] = state["position"]


class FakeRollouts:
    """Engines of a pool. Those of all pools draw the same. What an engine gets at once takes one duration together.

    suffix: of the names of their phases, for a pool that is shared.
    """

    def __init__(self, world: World, suffix: str = "", num_engines: int = 1) -> None:
        self.world, self.suffix = world, suffix
        self.lost: dict[int, Exception] = {}
        self._num_engines = num_engines

    @property
    def engines(self) -> dict[int, FakeCapacity]:
        return {number: FakeCapacity() for number in range(self._num_engines) if number not in self.lost}

    @property
    def num_lost(self) -> int:
        return len(self.lost)

    def begin(self, step: int, *, is_validation: bool) -> FakeGenerating:
        return FakeGenerating(self, step, is_validation)

    def joined(self, batch: FakeBatch) -> FakeRollout:
        return FakeRollout(batch, (4, 6) * (len(batch) // 2), (2, 8) * (len(batch) // 2))


@dataclass
class _Writing:
    """A row that is being written; the phase of all that came with it ends at its last row."""

    end: float
    phase: asyncio.Task[None]
    is_last: bool


class FakeGenerating:
    """The last of several rows is written in half of the time."""

    def __init__(self, rollouts: FakeRollouts, step: int, is_validation: bool) -> None:
        self._rollouts, self._step, self._is_validation = rollouts, step, is_validation
        self._held: dict[int, dict[int, _Writing]] = {}
        self._num_exchanges: dict[int, int] = {}
        self._prompts: dict[int, tuple[int, int]] = {}
        self._weights = rollouts.world.rollout

    async def exchange(self, engine: int, rows: Sequence[int], prompts: FakeBatch | None, num_rows: int) -> FakeReport:
        world, suffix = self._rollouts.world, self._rollouts.suffix
        held = self._held.setdefault(engine, {})
        if prompts is not None:
            assert suffix not in world.asleep, "the engine released its weights when it slept"
            assert len(prompts) == len(rows)
            held |= self._begin(rows)
            self._prompts |= dict(zip(rows, prompts.rows, strict=False))
        first = sorted(held, key=lambda row: held[row].end)[:num_rows]
        self._num_exchanges[engine] = self._num_exchanges.get(engine, 0) + 1
        loss = world.losses.get((suffix, engine, self._step))
        if loss is not None and loss.exchange == self._num_exchanges[engine] and not self._rollouts.lost:
            await world.time.sleep(loss.after_s)
            self._rollouts.lost[engine] = loss.failure
            return FakeReport(failure=loss.failure, are_rows_lost=loss.loses_rows)
        for row in first:
            await (held[row].phase if held[row].is_last else world.time.sleep(max(0.0, held[row].end - world.time.now)))
        assert world.rollout == self._weights, "the engines got other weights while they generated"
        for row in first:
            del held[row]
        of_what = "validation" if self._is_validation else self._step
        world.written.append((suffix, engine, self._step, first))
        prompts = tuple(self._prompts[row] for row in first if row in self._prompts)
        return FakeReport(first, FakeBatch(len(first), {"response": number_of(of_what, self._weights)}, prompts))

    def _begin(self, rows: Sequence[int]) -> dict[int, _Writing]:
        world, what = self._rollouts.world, "validate" if self._is_validation else "generate"
        name = f"{what}{self._rollouts.suffix}"
        if not self._is_validation:
            world.generated[self._step] = self._weights
        taken = world.durations[name]
        phase = asyncio.create_task(world.phase(name, 0 if self._is_validation else self._step))
        early = rows[-1] if len(rows) > 1 else None
        return {
            row: _Writing(world.time.now + (taken / 2 if row == early else taken), phase, row != early) for row in rows
        }

    async def end(self) -> None:
        if self._rollouts.world.engines_sleep and not self._is_validation:
            self._rollouts.world.asleep.add(self._rollouts.suffix)


class FakeActor:
    def __init__(self, world: World) -> None:
        self.world = world

    async def compute_log_prob(self, batch: FakeBatch) -> FakeBatch:
        weights = self.world.actor
        await self.world.phase("old_log_prob", int(batch.columns["step"]), len(batch))
        return FakeBatch(len(batch), {"old": number_of("old", batch.columns["response"], weights)})

    def log_prob_metrics(self, computed: FakeBatch) -> Metrics:
        return {"diff": 0.0}

    async def update(self, batch: FakeBatch) -> Metrics:
        await self.world.phase("update_actor", int(batch.columns["step"]))
        self.world.actor += batch.columns["advantage"]
        step = int(batch.columns["step"])
        self.world.actors[step] = self.world.actor
        self.world.trained.append((step, int(batch.columns.get("prompt", 0))))
        return {"actor/pg_loss": batch.columns["advantage"]}


class FakeCritic:
    def __init__(self, world: World) -> None:
        self.world = world

    async def compute_values(self, batch: FakeBatch) -> FakeBatch:
        weights = self.world.critic
        await self.world.phase("values", int(batch.columns["step"]), len(batch))
        return FakeBatch(len(batch), {"value": number_of("value", batch.columns["response"], weights)})

    async def update(self, batch: FakeBatch) -> Metrics:
        await self.world.phase("update_critic", int(batch.columns["step"]))
        self.world.critic += batch.columns["value"]
        return {"critic/vf_loss": batch.columns["value"]}


class FakeRef:
    def __init__(self, world: World) -> None:
        self.world = world

    async def compute_ref_log_prob(self, batch: FakeBatch) -> FakeBatch:
        await self.world.phase("ref", int(batch.columns["step"]), len(batch))
        return FakeBatch(len(batch), {"ref": number_of("ref", batch.columns["response"])})


class FakeScores:
    """A way of scoring: `reward` is the function, `reward_model` the model."""

    def __init__(self, world: World, what: str, column: str) -> None:
        self.world, self.what, self.column = world, what, column

    async def compute_scores(self, batch: FakeBatch) -> FakeBatch:
        await self.world.phase(self.what, int(batch.columns["step"]), len(batch))
        return FakeBatch(len(batch), {self.column: number_of(self.what, batch.columns["response"])})

    def metrics(self, scores: FakeBatch) -> Metrics:
        return {f"{self.what}/seen": float(len(scores) == NUM_ROWS)}


class FakeReward:
    def __init__(self, world: World, ways: str) -> None:
        self.world, both = world, ways == "Both"
        self.function = FakeScores(world, "reward", "of_function" if both else "score") if ways != "Model" else None
        self.model = FakeScores(world, "reward_model", "of_model" if both else "score") if ways != "Function" else None

    async def total(self, batch: FakeBatch) -> tuple[FakeBatch, Metrics]:
        if self.function is None or self.model is None:
            return batch, {}
        score = batch.columns["of_function"] + batch.columns["of_model"]
        return batch.union(FakeBatch(2, {"score": score})), {"reward/model/mean": batch.columns["of_model"]}

    def row_scores(self, batch: FakeBatch) -> list[float | None]:
        """Half of the prompts have different scores, by their numbers; those of the rows are 0 or 1."""
        assert "score" in batch.columns
        return [
            float(sample % 2 and number_of("mixed", prompt) < self.world.share_of_mixed)
            for prompt, sample in batch.rows
        ]

    async def validate(self, batch: FakeBatch) -> Metrics:
        if self.model is not None:
            await self.world.phase("judge")
        return {"val-core/score/mean": batch.columns["response"]}


@dataclass
class FakeHook:
    """A user's method; it returns one column, or none after Step, and a metric."""

    world: World
    after: HookPoint
    worker: str = "shaper"
    column: str = "score"

    async def call(self, batch: FakeBatch, step: int) -> tuple[FakeBatch, Metrics]:
        await self.world.phase(f"hook_{self.after.value}", step)
        metrics = {f"{self.worker}/{self.after.value}": float(len(batch.columns))}
        if self.after is HookPoint.STEP:
            return batch, metrics
        return batch.replaced_by(FakeBatch(2, {self.column: number_of(sorted(batch.columns.items()))})), metrics


class FakeAdvantages:
    def __init__(self, world: World) -> None:
        self.world = world

    async def compute_advantages(self, batch: FakeBatch, kl_coefficient: float) -> tuple[FakeBatch, Metrics]:
        await self.world.phase("advantages", int(batch.columns["step"]))
        read = {name: value for name, value in batch.columns.items() if name != "diff"}
        advantage = number_of("advantage", sorted(read.items()), kl_coefficient, batch.rows)
        return FakeBatch(2, {"advantage": advantage}), {
            "critic/score/mean": batch.columns["score"],
            "actor/reward_kl_penalty": 0.5,
        }


class FakeWeights:
    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def are_released(self) -> bool:
        return self.world.engines_sleep

    async def push(self, version: int) -> dict[str, float]:
        weights = self.world.actor
        await self.world.phase("push", version)
        assert self.world.actor == weights, "the actor was updated while its weights were sent"
        self.world.rollout = weights
        self.world.asleep.clear()
        return {"comm_mb/update_weights": 269.0}


def fake_ports(
    world: World,
    *,
    has_critic: bool = True,
    has_ref: bool = True,
    reward: str = "Function",
    hooks: Sequence[HookPoint] = (),
    shared: Sequence[str] = (),
) -> Ports[FakeBatch]:
    """Return all ports of a world."""
    return Ports(
        data=FakeData(world),
        rollout=FakeRollouts(world),
        actor=FakeActor(world),
        critic=FakeCritic(world) if has_critic else None,
        ref=FakeRef(world) if has_ref else None,
        reward=FakeReward(world, reward),
        advantages=FakeAdvantages(world),
        weights=FakeWeights(world),
        hooks=[FakeHook(world, point) for point in hooks],
        shared={role: FakeRollouts(world, "_shared") for role in shared},
    )
