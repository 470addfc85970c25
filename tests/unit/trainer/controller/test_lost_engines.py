"""A lost engine: the others repeat its samples, every number stays, and only the last one's loss ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.controller.forward import ChainPhases, ForwardPhase, StreamedPhases, at_once
from ppojob_trainer.controller.generation import Generation, Listener
from ppojob_trainer.controller.phases import Phases
from ppojob_trainer.controller.schedule import schedule_of
from tests.unit.trainer.controller.conftest import MakeRun, Run
from tests.unit.trainer.controller.fake_engines import FakeRollouts
from tests.unit.trainer.controller.fake_ports import FakeData, FakePrompts, fake_ports
from tests.unit.trainer.controller.fake_world import FakeBatch, Loss, World

MODES = [ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED]
TIMES = ("timing", "perf/throughput", "perf/time_per_step", "pool/", "overlap/")
OF_ENGINES = (
    "rollout/lost_engines",
    "rollout/repeated_samples",
    "rollout/elastic_losses",
    "rollout/engines",
    "rollout/repeated_tokens",
    "rollout/lost_s",
)
POOLS = {"data": "a", "actor": "a", "rollout": "a", "critic": "c", "ref": "c", "reward": "c", "rollout_shared": "c"}
ALONE = {"data": "a", "actor": "a", "rollout": "r", "critic": "a", "ref": "a", "reward": "a"}
APART = {"data": "a", "actor": "a", "rollout": "r", "critic": "a", "ref": "a", "reward": "a", "rollout_shared": "s"}


def numbers(run: Run) -> object:
    records = {
        step: {name: value for name, value in record.items() if not name.startswith(TIMES) and name not in OF_ENGINES}
        for step, record in run.monitor.records.items()
    }
    return records, run.world.actor, run.world.critic


def of_engines(run: Run, steps: Sequence[int]) -> list[tuple[float, float]]:
    records = run.monitor.records
    return [(records[step][OF_ENGINES[0]], records[step][OF_ENGINES[1]]) for step in steps]


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("loses_rows", [False, True])
@pytest.mark.parametrize("suffix", ["", "_shared"])
@pytest.mark.parametrize("after_s", [0.0, 3.0, 9.9])
@pytest.mark.parametrize("mode", MODES)
async def test_the_engines_of_the_other_pool_repeat_its_samples(
    make_run: MakeRun, mode: ScheduleMode, after_s: float, suffix: str, loses_rows: bool, sleeps: bool
) -> None:
    runs = []
    for losses in ({}, {(suffix, 0, 2): Loss(after_s, loses_rows)}):
        run = make_run(mode, steps=4, validate_every=1, pool_of=POOLS, shared=["rollout_shared"])
        run.world.engines_sleep = sleeps
        run.world.losses.update(losses)
        assert (await run()).is_finished
        runs.append(run)
    whole, lost = runs

    assert numbers(lost) == numbers(whole)
    assert of_engines(whole, [1, 2, 3, 4]) == [(0, 0)] * 4
    assert of_engines(lost, [1, 2, 3, 4]) == [(0, 0), (1, 1), (1, 0), (1, 0)]
    pools = {pool for pool, _, step, _ in lost.world.written if step > 2}
    assert pools == {"" if suffix else "_shared"}, "the run goes on without it"


@pytest.mark.parametrize("loses_rows", [False, True])
async def test_engines_that_sleep_get_their_weights_again_for_samples_that_are_lost_at_the_end(
    make_run: MakeRun, loses_rows: bool
) -> None:
    run = make_run(ScheduleMode.OVERLAPPED, steps=2, pool_of=POOLS, shared=["rollout_shared"])
    run.world.engines_sleep = True
    run.world.durations["generate_shared"] = 40.0
    run.world.losses["_shared", 0, 1] = Loss(30.0, loses_rows)

    await run()

    world = run.world
    again = [time for time, name, edge in world.events if (name, edge) == ("generate 1", "start")]
    pushed = [time for time, name, edge in world.events if name.startswith("push") and edge == "end"]
    assert len(again) == 2
    assert pushed[0] == again[1] >= again[0] + 30


@pytest.mark.parametrize("loses_rows", [False, True])
async def test_rows_that_were_reported_are_dropped_and_come_again_only_if_they_are_lost(loses_rows: bool) -> None:
    world = World()
    world.losses["", 0, 1] = Loss(1.0, loses_rows, exchange=2)
    ports = replace(fake_ports(world), rollout=FakeRollouts(world, num_engines=2))
    generation = Generation(ports, Phases({"rollout": "a"}, 1000.0, clock=lambda: world.time.now))
    prompts = FakeBatch(8, {}, tuple((prompt, sample) for prompt in range(4) for sample in range(2)))
    taken: list[int] = []
    dropped: list[int] = []
    listener = Listener[FakeBatch](lambda rows, _: taken.extend(rows), dropped.extend, lambda _: None)

    rollout = await world.time.run(generation.write(FakePrompts(prompts), 1, listener))

    reported = world.written[0][3]
    assert world.written[0][:2] == ("", 0)
    assert dropped == (reported if loses_rows else [])
    assert sorted(taken) == sorted([*range(8), *dropped])
    assert rollout.batch.rows == prompts.rows, "each response is in its prompt's row"
    found = generation.metrics()
    assert found["rollout/repeated_samples"] == 3 + len(dropped)
    assert found["rollout/repeated_tokens"] == 12 + 8 * len(dropped), "responses have 2 and 8 tokens by turns"
    assert found["rollout/lost_s"] > 0
    assert generation.metrics() == {
        "rollout/engines": 1,
        "rollout/lost_engines": 1,
        "rollout/elastic_losses": 0,
        "rollout/repeated_samples": 0,
        "rollout/repeated_tokens": 0,
        "rollout/lost_s": 0,
    }, "of each step only its own"


async def test_the_loss_of_the_last_engine_ends_the_run_with_its_failure(make_run: MakeRun) -> None:
    run = make_run(ScheduleMode.OVERLAPPED, steps=2, pool_of=POOLS, shared=["rollout_shared"])
    first, last = RuntimeError("rollout rank 0 was lost"), RuntimeError("rollout_c rank 0 was lost")
    run.world.losses["", 0, 2] = Loss(1.0, failure=first)
    run.world.losses["_shared", 0, 2] = Loss(4.0, failure=last)

    with pytest.raises(RuntimeError) as found:
        await run()

    assert found.value is last


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("lost_in", "joins_at"), [(2, 0.0), (2, 500.0), ("validation", 500.0)])
async def test_a_generation_waits_for_an_engine_that_comes_back_and_no_number_changes(
    make_run: MakeRun, mode: ScheduleMode, lost_in: int | str, joins_at: float
) -> None:
    runs = []
    step = 1 if lost_in == "validation" else 2
    for losses in ({}, {("", 0, step): Loss(1.0, is_validation=lost_in == "validation")}):
        run = make_run(mode, steps=4, validate_every=1, pool_of=ALONE)
        run.world.losses.update(losses)
        if losses:
            run.world.joins[""] = [joins_at]
        assert (await run()).is_finished
        runs.append(run)
    whole, found = runs

    assert numbers(found) == numbers(whole)
    assert of_engines(found, [4]) == [(0, 0)], "only pools whose engines do not come back"
    assert found.monitor.records[4]["rollout/elastic_losses"] == 1
    engines = [number for _, number, of_step, _ in found.world.written if of_step > step]
    assert set(engines) == {1}, "the one that came back has another number"
    assert found.world.time.now >= joins_at


async def test_an_engine_that_joins_generates_from_the_next_push_on(make_run: MakeRun) -> None:
    run = make_run(ScheduleMode.SERIAL, steps=4, pool_of=ALONE)
    run.world.joins[""] = [run.world.durations["generate"] / 2]

    await run()

    assert [run.monitor.records[step]["rollout/engines"] for step in (1, 2, 3, 4)] == [1, 2, 2, 2]
    joined = {step for pool, number, step, _ in run.world.written if (pool, number) == ("", 1)}
    assert joined == {2, 3, 4}


@pytest.mark.parametrize("staleness", [1, 2])
async def test_one_step_off_continues_with_the_engines_that_are_left(make_run: MakeRun, staleness: int) -> None:
    schedule = replace(schedule_of(ScheduleMode.ONE_STEP_OFF), max_staleness=staleness)
    runs = []
    for losses in ({}, {("", 0, 3): Loss(2.0)}):
        run = make_run(schedule, steps=6, pool_of=APART, shared=["rollout_shared"])
        run.world.losses.update(losses)
        assert (await run()).is_finished
        runs.append(run)

    assert numbers(runs[1]) == numbers(runs[0])
    assert runs[1].monitor.records[6]["rollout/lost_engines"] == 1
    data = runs[1].ppo._ports.data
    assert isinstance(data, FakeData)
    assert data.num_kept == 6, "of each step: an engine that is lost later does not take them"


async def test_rows_that_were_lost_are_computed_again_whether_they_waited_or_were_computed_or_between() -> None:
    gates = {"done": asyncio.Event(), "inside": asyncio.Event(), "waits": asyncio.Event()}
    seen: list[tuple[str, tuple[tuple[int, int], ...]]] = []

    def phase(name: str, ready: asyncio.Event, done: asyncio.Event) -> ForwardPhase[FakeBatch]:
        async def compute(batch: FakeBatch) -> FakeBatch:
            seen.append((name, batch.rows))
            await done.wait()
            return FakeBatch(len(batch), {name: 1.0}, batch.rows)

        return ForwardPhase(compute, lambda _: {}, ready.wait)

    opened = gates["done"]
    opened.set()
    phases = {
        "done": phase("done", opened, opened),
        "inside": phase("inside", opened, gates["inside"]),
        "waits": phase("waits", gates["waits"], opened),
    }
    streamed = StreamedPhases(phases, 3)
    for name in phases:
        streamed.follow(ChainPhases([name]))
    first, again = (1, 0), (1, 1)
    streamed.add([0, 1], FakeBatch(2, {}, ((0, 0), first)))
    for _ in range(10):
        await asyncio.sleep(0)

    streamed.drop([1])
    streamed.add([2, 1], FakeBatch(2, {}, ((2, 0), again)))
    streamed.end()
    for gate in gates.values():
        gate.set()
    found = await streamed.found()

    whole = ((0, 0), again, (2, 0))
    assert {name: columns.rows for name, columns in found.items()} == dict.fromkeys(phases, whole)
    assert [rows for name, rows in seen if name == "waits"] == [((0, 0), (2, 0), again)], "lost rows are not read"


async def test_rows_that_wait_are_read_from_the_kept_batch() -> None:
    """The engines that made the parts may be lost before a later step's phases come to them."""
    opened, seen = asyncio.Event(), []

    async def compute(batch: FakeBatch) -> FakeBatch:
        seen.append(batch.columns)
        await opened.wait()
        return FakeBatch(len(batch), {"score": 1.0}, batch.rows)

    streamed = StreamedPhases({"score": ForwardPhase(compute, lambda _: {}, at_once)}, 2)
    streamed.follow(ChainPhases(["score"]))
    streamed.add([1], FakeBatch(1, {"from": 0.0}, ((1, 0),)))
    for _ in range(10):
        await asyncio.sleep(0)
    streamed.add([0], FakeBatch(1, {"from": 0.0}, ((0, 0),)))

    streamed.read_from(FakeBatch(2, {"from": 9.0}, ((0, 0), (1, 0))))
    streamed.end()
    opened.set()
    found = await streamed.found()

    assert seen == [{"from": 0.0}, {"from": 9.0}]
    assert found["score"].rows == ((0, 0), (1, 0))
