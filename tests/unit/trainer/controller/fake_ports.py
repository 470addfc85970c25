"""Ports without processes: every phase takes virtual time, and every number shows its inputs.

`fake_world` has the models and the time, `fake_engines` the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.ports import Metrics, Ports
from tests.unit.trainer.controller.fake_engines import FakeRollouts
from tests.unit.trainer.controller.fake_world import NUM_ROWS, FakeBatch, World, number_of

T = TypeVar("T")
EPOCH_PROMPTS = 23
"""Prompts of an epoch, where dynamic sampling requests them."""


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
            return FakePrompts(FakeBatch(self.world.num_rows, {"step": step, "prompt": self.position}))
        epoch, place = divmod(self.position, EPOCH_PROMPTS)
        self.counts.setdefault(step, []).append(count)
        prompts = range(self.position, self.position + min(count, EPOCH_PROMPTS - place))
        self.position = self.positions[step] = prompts.stop
        rows = tuple((prompt, sample) for prompt in prompts for sample in range(NUM_ROWS))
        return FakePrompts(FakeBatch(len(rows), {"step": step}, rows), epoch)

    async def give_back(self, step: int, used: int) -> None:
        before = max((each for each in self.positions if each < step), default=0)
        assert self.positions[before] + used <= self.position
        self.position = self.positions[step] = self.positions[before] + used

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
    """The reference in a pool; what: `ref`, or `ref_copy` in another one."""

    def __init__(self, world: World, what: str) -> None:
        self.world, self.what = world, what

    async def compute_ref_log_prob(self, batch: FakeBatch) -> FakeBatch:
        await self.world.phase(self.what, int(batch.columns["step"]), len(batch))
        return FakeBatch(len(batch), {"ref": number_of("ref", batch.columns["response"])})


class FakeScores:
    """A way of scoring: `reward` is the function, `reward_model` the model, `reward_model_copy` that of another pool.

    Of validations, only the model takes time: `judge`, or `judge_copy`.
    """

    def __init__(self, world: World, what: str, column: str, suffix: str = "") -> None:
        self.world, self.what, self.column, self.suffix = world, what, column, suffix

    async def compute_scores(self, batch: FakeBatch) -> FakeBatch:
        if "step" in batch.columns:
            await self.world.phase(f"{self.what}{self.suffix}", int(batch.columns["step"]), len(batch))
        elif self.what == "reward_model":
            await self.world.phase(f"judge{self.suffix}")
        return FakeBatch(len(batch), {self.column: number_of(self.what, batch.columns["response"])})

    def metrics(self, scores: FakeBatch) -> Metrics:
        return {f"{self.what}/seen": float(len(scores) == self.world.num_rows)}


class FakeReward:
    def __init__(self, world: World, ways: str, copies: Sequence[str]) -> None:
        self.world, both = world, ways == "Both"
        self.function = FakeScores(world, "reward", "of_function" if both else "score") if ways != "Model" else None
        suffixes = {"reward_model": "", **dict.fromkeys(copies, "_copy")} if ways != "Function" else {}
        column = "of_model" if both else "score"
        self.models = {role: FakeScores(world, "reward_model", column, suffix) for role, suffix in suffixes.items()}

    async def total(self, batch: FakeBatch) -> tuple[FakeBatch, Metrics]:
        if self.function is None or not self.models:
            return batch, {}
        score = batch.columns["of_function"] + batch.columns["of_model"]
        return batch.union(FakeBatch(len(batch), {"score": score})), {"reward/model/mean": batch.columns["of_model"]}

    def row_scores(self, batch: FakeBatch) -> list[float | None]:
        """Half of the prompts have different scores, by their numbers; those of the rows are 0 or 1."""
        assert "score" in batch.columns
        return [
            float(sample % 2 and number_of("mixed", prompt) < self.world.share_of_mixed)
            for prompt, sample in batch.rows
        ]

    async def validate(self, batch: FakeBatch, scores: Sequence[FakeBatch]) -> Metrics:
        assert [len(each) for each in scores] == [len(batch)] * ((self.function is not None) + bool(self.models))
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
        return batch.replaced_by(
            FakeBatch(len(batch), {self.column: number_of(sorted(batch.columns.items()))})
        ), metrics


class FakeAdvantages:
    def __init__(self, world: World) -> None:
        self.world = world

    async def compute_advantages(self, batch: FakeBatch, kl_coefficient: float) -> tuple[FakeBatch, Metrics]:
        await self.world.phase("advantages", int(batch.columns["step"]))
        read = {name: value for name, value in batch.columns.items() if name != "diff"}
        advantage = number_of("advantage", sorted(read.items()), kl_coefficient, batch.rows)
        return FakeBatch(len(batch), {"advantage": advantage}), {
            "critic/score/mean": batch.columns["score"],
            "actor/reward_kl_penalty": 0.5,
        }


class FakeWeights:
    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def are_released(self) -> bool:
        return self.world.engines_sleep

    @property
    def come_back(self) -> bool:
        return bool(self.world.joins)

    @property
    def compared_version(self) -> int | None:
        return self.world.compared_version

    async def wait_for_engine(self) -> None:
        world = self.world
        if not sum([admit() for admit in world.admissions]):
            await world.time.sleep(max(0.0, min(at for each in world.joins.values() for at in each) - world.time.now))
            assert sum([admit() for admit in world.admissions]), "an engine has come back"

    async def push(self, version: int) -> dict[str, float]:
        world = self.world
        world.compared_version = version
        await self.wait_for_engine()
        weights = self.world.actor
        if world.in_flight:
            world.pauses.append((world.time.now, world.time.now + world.durations["push"]))
        await self.world.phase("push", version)
        assert self.world.actor == weights, "the actor was updated while its weights were sent"
        self.world.rollout, self.world.version = weights, version
        self.world.asleep.clear()
        return {"comm_mb/update_weights": 269.0}


def fake_ports(
    world: World,
    *,
    has_critic: bool = True,
    has_ref: bool = True,
    ref_copies: Sequence[str] = (),
    reward: str = "Function",
    reward_copies: Sequence[str] = (),
    hooks: Sequence[HookPoint] = (),
    shared: Sequence[str] = (),
) -> Ports[FakeBatch]:
    """Return all ports of a world. ref_copies, reward_copies: roles of reference and reward model in further pools."""
    copies = {role: FakeRef(world, "ref_copy") for role in ref_copies}
    return Ports(
        data=FakeData(world),
        rollout=FakeRollouts(world),
        actor=FakeActor(world),
        critic=FakeCritic(world) if has_critic else None,
        refs={"ref": FakeRef(world, "ref"), **copies} if has_ref else {},
        reward=FakeReward(world, reward, reward_copies),
        advantages=FakeAdvantages(world),
        weights=FakeWeights(world),
        hooks=[FakeHook(world, point) for point in hooks],
        shared={role: FakeRollouts(world, "_shared") for role in shared},
    )
