"""What passes the controller in a step: references, row numbers, lengths and metrics; never a column.

The real controller runs whole steps with the real worker groups on Ray, in Overlapped; only the engines in the workers
are replaced by some that make columns of a given length. Everything that Ray packs or unpacks in this process is
counted, arguments and answers, small or large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from ray._private.serialization import SerializationContext

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.controller.layout import pools_of_phases, pools_of_roles
from ppojob_trainer.controller.phases import Phases
from ppojob_trainer.controller.ppo import PPO, PPOSettings, Prepared
from ppojob_trainer.controller.schedule import schedule_of
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.main import groups as groups_module
from ppojob_trainer.main.connection import connected
from ppojob_trainer.main.groups import Groups, launch
from ppojob_trainer.maths.kl import make_kl_controller
from ppojob_trainer.protocol import Keys
from ppojob_trainer.worker_groups.launch import Launcher, wait_until_up
from ppojob_trainer.worker_groups.partition import Share
from ppojob_trainer.worker_groups.placement import place
from ppojob_trainer.worker_groups.roles.data import DataWorker
from ppojob_trainer.worker_groups.roles.reward import RewardWorker
from ppojob_trainer.worker_groups.roles.trained import join
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup, _Connection
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from tests.integration.trainer.runs import TASK, job_of, spec_of
from tests.integration.trainer.traffic_workers import (
    READ_BY_ACTOR,
    READ_BY_CRITIC,
    ColumnActor,
    ColumnCritic,
    ColumnRef,
    ColumnRollout,
)

pytestmark = pytest.mark.timeout(900)

ROWS, RANKS = 64, 2
PROMPT, SHORT, LONG = 256, 64, 8192
COLUMNS = (Keys.OLD_LOG_PROBS, Keys.VALUES, Keys.REF_LOG_PROB, Keys.TOKEN_LEVEL_SCORES, Keys.ADVANTAGES)
FLOAT32_BYTES = 4
LIMIT_S = 300.0
"""Also of the start of seven processes, which import torch at the same time."""


@dataclass
class Traffic:
    """Bytes that this process gave to Ray, and got from it."""

    sent: int = 0
    received: int = 0

    @property
    def total(self) -> int:
        return self.sent + self.received


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Count what is packed and unpacked within the block."""
    traffic = Traffic()
    pack, unpack = SerializationContext.serialize, SerializationContext.deserialize_objects

    def packed(self: Any, value: Any) -> Any:
        found = pack(self, value)
        traffic.sent += found.total_bytes
        return found

    def unpacked(self: Any, serialized: Any, *args: Any) -> Any:
        traffic.received += sum(len(data) for data, *_ in serialized if data is not None)
        return unpack(self, serialized, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SerializationContext, "serialize", packed)
        patch.setattr(SerializationContext, "deserialize_objects", unpacked)
        yield traffic


@pytest.fixture(scope="module")
def spec(model: Path, tmp_path_factory: pytest.TempPathFactory) -> PPOJobSpec:
    """Two ranks train the policy; each step has 64 rows and two minibatches."""
    raw = spec_of(
        model,
        data={
            "train": {"reasoningGym": {**TASK, "size": ROWS, "seed": 1}},
            "trainBatchSize": ROWS,
            "maxPromptLength": PROMPT,
            "maxResponseLength": LONG,
        },
        actor={"miniBatchSize": ROWS // 2},
        critic={"miniBatchSize": ROWS // 2},
        pools=[{"name": "actor", "gpusPerNode": RANKS}, {"name": "critic", "gpusPerNode": 1}],
    )
    return job_of(tmp_path_factory.mktemp("run"), raw).spec


@pytest.fixture(scope="module")
def groups(spec: PPOJobSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    """The groups of a job, ready but for the models."""
    classes = {
        "ActorWorker": ColumnActor,
        "CriticWorker": ColumnCritic,
        "RefWorker": ColumnRef,
        "RolloutWorker": ColumnRollout,
    }
    with connected(spec), pytest.MonkeyPatch.context() as patch:
        for name, worker in classes.items():
            patch.setattr(groups_module, name, worker)
        patch.setattr(WeightsGroup, "_connect", connect_nothing)
        pools = asyncio.run(place(spec, LIMIT_S))
        started = launch(spec, pools, Launcher(tmp_path_factory.mktemp("logs"), LIMIT_S))
        asyncio.run(make_ready(started))
        yield started
        for group in started.all():
            group.kill()
        for pool in pools.values():
            pool.release()


async def connect_nothing(weights: WeightsGroup) -> list[Transports]:
    """Connect: the engines here have no weights, and the senders return receipts without a connection."""
    weights._connection = _Connection(weights._members(), weights._link_plans(), weights._receiving())
    return []


async def make_ready(groups: Groups) -> None:
    assert groups.critic is not None
    assert groups.reward.function is not None
    await wait_until_up(groups.all())
    references = [ref.group for ref in groups.own_refs.values()]
    members: list[WorkerGroup[Any]] = [groups.actor.group, groups.critic.group, *references]
    meeting = [join(group) for group in members]
    loaded, *_ = await asyncio.gather(groups.data.group.call(DataWorker.load), *meeting)
    await groups.reward.function.group.call(RewardWorker.load_tokenizer)
    await groups.reward.function.group.call(RewardWorker.load, loaded.sources)
    await groups.rollout.begin_load()
    await groups.rollout.load()


async def has_engine() -> bool:
    return True


async def one_step(ppo: PPO[Table], step: int, length: int) -> Prepared[Table]:
    """Run a step, and see that both updates read all of their columns."""
    prepared = await ppo.prepare(step)
    updated = {**await ppo.apply(prepared, has_engine), **await ppo.late_metrics()}
    tokens, responses = sum(prepared.batch.tokens), sum(prepared.batch.sums[Keys.RESPONSE_MASK])
    assert ROWS * (length - 7) < responses <= ROWS * length
    # A metric is the mean over the ranks. The first column has the prompts' tokens, too.
    assert updated["actor/numbers"] * RANKS == tokens + responses * (len(READ_BY_ACTOR) - 1)
    assert updated["critic/numbers"] == tokens + responses * (len(READ_BY_CRITIC) - 1)
    return prepared


def rollout_of(groups: Groups) -> WorkerGroup[ColumnRollout]:
    return cast("WorkerGroup[ColumnRollout]", groups.rollout.group)


def controller_of(groups: Groups, spec: PPOJobSpec) -> PPO[Table]:
    return PPO(
        groups.ports(),
        schedule_of(spec.schedule.mode, spec.schedule.disabled_overlaps),
        Phases(pools_of_phases(spec), LIMIT_S),
        PPOSettings(pools_of_roles(spec), LONG),
        make_kl_controller("Adaptive", 0.1, 0.1, 10_000),
    )


async def measured(groups: Groups, spec: PPOJobSpec, length: int, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    await rollout_of(groups).call(ColumnRollout.answer_with, length)
    ppo = controller_of(groups, spec)
    # Ray sends what it sends once for each function and class, the first time.
    await one_step(ppo, 1, length)
    with counted(monkeypatch) as traffic:
        await one_step(ppo, 2, length)
    return traffic


async def test_bytes_through_the_controller_do_not_grow_with_the_sequences(
    groups: Groups, spec: PPOJobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = await measured(groups, spec, SHORT, monkeypatch), await measured(groups, spec, LONG, monkeypatch)

    column = ROWS * LONG * FLOAT32_BYTES
    print(f"{ROWS} rows: {short} at {SHORT} tokens, {long} at {LONG}; one column is {column} bytes")
    # Lengths are larger numbers, and results of many bytes lie in more blocks, up to MAX_BLOCKS, with a reference each.
    assert abs(long.total - short.total) < column / 50
    assert long.total < column / 8
    assert min(long.sent, long.received) > 8 * ROWS, "the counter sees both ways"


async def test_the_counter_sees_a_column_that_is_fetched(
    groups: Groups, spec: PPOJobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rollout_of(groups).call(ColumnRollout.answer_with, LONG)
    prepared = await one_step(controller_of(groups, spec), 1, LONG)

    with counted(monkeypatch) as traffic:
        prepared.batch.rows(Share(tuple(range(ROWS)))).pull(LIMIT_S)

    assert traffic.received > len(COLUMNS) * ROWS * (LONG - 7) * FLOAT32_BYTES
