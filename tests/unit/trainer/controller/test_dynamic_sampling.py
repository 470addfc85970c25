"""Dynamic sampling: full batches of prompts whose scores differ, the same in every schedule and after a restart.

Which prompts a batch has is computed here from their numbers alone, and compared with what the controller does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count, cycle, islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.controller.batch_filler import BatchFiller, FillerCalls, Scored
from ppojob_trainer.controller.dynamic_sampling import Candidates, DynamicSampler, SamplingSettings, is_mixed
from ppojob_trainer.controller.errors import BatchNotFilledError
from ppojob_trainer.controller.generation import Generation, Writing
from ppojob_trainer.controller.phases import Phases
from ppojob_trainer.controller.schedule import Schedule, schedule_of
from ppojob_trainer.controller.storage_ports import Restored
from tests.unit.trainer.controller.conftest import SPLIT, MakeRun, Run
from tests.unit.trainer.controller.fake_engines import FakeCapacity, FakeReport
from tests.unit.trainer.controller.fake_ports import EPOCH_PROMPTS, FakeData, fake_ports
from tests.unit.trainer.controller.fake_world import NUM_ROWS, FakeBatch, Loss, World, number_of
from tests.unit.trainer.controller.timed_engines import TimedRollouts, uneven

MODES = [ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED]
TIMES = ("timing", "perf/throughput", "perf/time_per_step", "pool/", "overlap/", "sampling/surplus")
NUM_PROMPTS = 6
SETTINGS = {"sampling": SamplingSettings(NUM_PROMPTS, NUM_ROWS, max_batches=10)}


def data_of(run: Run) -> FakeData:
    data = run.ppo._ports.data
    assert isinstance(data, FakeData)
    return data


def numbers_of(run: Run) -> Any:
    records = {
        step: {name: value for name, value in record.items() if not name.startswith(TIMES)}
        for step, record in run.monitor.records.items()
    }
    return records, run.world.actor, run.world.critic, run.checkpoints.saved, data_of(run).positions


def watch_batches(run: Run) -> dict[int, FakeBatch]:
    """Collect the batch of each update."""
    batches: dict[int, FakeBatch] = {}
    actor = run.ppo._ports.actor
    update = actor.update

    async def watched(batch: FakeBatch) -> Mapping[str, float]:
        batches[int(batch.columns["step"])] = batch
        return await update(batch)

    actor.update = watched  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize("reward", ["Function", "Model", "Both"])
@pytest.mark.parametrize("engines_sleep", [False, True])
async def test_all_modes_give_the_same_numbers(make_run: MakeRun, reward: str, engines_sleep: bool) -> None:
    numbers = []
    for mode in MODES:
        run = make_run(mode, steps=4, save_every=2, settings=SETTINGS, reward=reward)
        run.world.engines_sleep = engines_sleep
        await run()
        numbers.append(numbers_of(run))

    assert numbers[0] == numbers[1] == numbers[2]
    assert any(len(requests) > 1 for requests in data_of(run).counts.values()), "a step must request further prompts"


def first_mixed(start: int, share: float = 0.5) -> list[int]:
    """Return the first prompts from `start` on whose scores differ."""
    return list(islice((n for n in count(start) if number_of("mixed", n) < share), NUM_PROMPTS))


def check_batches(run: Run, batches: Mapping[int, FakeBatch], steps: Iterable[int], share: float = 0.5) -> None:
    """Each batch has the first prompts whose scores differ after those of the step before; the data stop there."""
    for step in steps:
        start = data_of(run).positions[step - 1]
        expected = first_mixed(start, share)
        rows = tuple((prompt, sample) for prompt in expected for sample in range(NUM_ROWS))
        assert batches[step].rows == rows, f"step {step}"
        assert data_of(run).positions[step] == expected[-1] + 1, "the others come again in the next step"
        record = run.monitor.records[step]
        assert record["sampling/prompts"] == expected[-1] + 1 - start
        assert record["training/epoch"] == expected[-1] // EPOCH_PROMPTS
        assert record["sampling/kept_share"] == NUM_PROMPTS / record["sampling/prompts"]


async def test_a_batch_waits_for_responses_that_were_scored_and_lost() -> None:
    sampler, data = DynamicSampler(SamplingSettings(2, 2, 5)), FakeData(World())
    phases = Phases({"rollout": "a"}, 1000.0)
    generation = Generation(fake_ports(data.world), phases)

    async def score(batch: FakeBatch) -> Scored[FakeBatch]:
        return Scored(batch, {"reward": batch}, [float(sample) for _, sample in batch.rows], {})

    async def write(work: Writing[FakeBatch]) -> None:
        async def report(engine: int, *rows: int) -> bool:
            work.settle(("rollout", engine), FakeReport(rows, FakeBatch(len(rows), {"response": 1.0})), 0.0)
            for _ in range(20):
                await asyncio.sleep(0)
            return work.is_closed

        work.queue.take(("rollout", 0))
        assert not await report(0, 0, 1)
        work.settle(("rollout", 0), FakeReport(failure=RuntimeError("lost"), are_rows_lost=True), 0.0)
        work.queue.join(("rollout", 1), FakeCapacity())
        work.queue.take(("rollout", 1))
        assert not await report(1, 2, 3), "the first prompt is not known any more"
        assert await report(1, 0, 1)

    generation.run = write  # type: ignore[method-assign, assignment]
    calls = FillerCalls(
        lambda count: data.prompts(1, count),
        lambda used: data.give_back(1, used),
        asyncio.Event().wait,
        score,
        ["reward"],
    )
    filler = BatchFiller(sampler, generation, calls, 1, is_streamed=True)

    filled = await data.world.time.run(filler.fill())

    assert filled.batch.rows == ((0, 0), (0, 1), (1, 0), (1, 1))


@pytest.mark.parametrize("mode", MODES)
async def test_a_batch_has_the_first_prompts_whose_scores_differ(make_run: MakeRun, mode: ScheduleMode) -> None:
    run = make_run(mode, steps=3, settings=SETTINGS)
    batches = watch_batches(run)

    await run()

    check_batches(run, batches, (1, 2, 3))
    for step in (1, 2, 3):
        record = run.monitor.records[step]
        assert 0 <= record["sampling/surplus_prompts"] <= sum(data_of(run).counts[step]) - record["sampling/prompts"]
        assert 0 <= record["sampling/surplus_samples"] <= NUM_ROWS * record["sampling/surplus_prompts"]
    assert any(
        record["sampling/surplus_prompts"] for record in run.monitor.records.values() if "sampling/prompts" in record
    )


PLACES = {
    "one pool": {"data": "a", "actor": "a", "rollout": "a", "critic": "a", "ref": "a", "reward": "a"},
    "critic apart": SPLIT,
    "rollout apart": {"data": "a", "actor": "a", "rollout": "r", "critic": "a", "ref": "a", "reward": "a"},
}


def timed_run(make_run: MakeRun, seed: int, schedule: Schedule, *, num_engines: int, num_slots: int, **run: Any) -> Run:
    """Return a run whose engines generate responses of uneven lengths."""
    made = make_run(schedule, settings=SETTINGS, **run)
    engines = TimedRollouts(made.world, num_engines, num_slots, uneven(seed))
    made.ppo._generation._engines = {"rollout": engines}
    made.ppo._generation._own = engines
    made.ppo._ports = replace(made.ppo._ports, rollout=engines)
    return made


def engines_of(run: Run) -> TimedRollouts:
    engines = run.ppo._ports.rollout
    assert isinstance(engines, TimedRollouts)
    return engines


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    mode=st.sampled_from(MODES),
    place=st.sampled_from(sorted(PLACES)),
    engines=st.tuples(st.integers(1, 4), st.integers(1, 8)),
    share=st.sampled_from([0.25, 0.5, 0.9]),
    reward=st.sampled_from(["Function", "Both"]),
    reward_s=st.floats(0.01, 20.0),
)
async def test_neither_times_nor_engines_change_a_batch(
    make_run: MakeRun,
    seed: int,
    mode: ScheduleMode,
    place: str,
    engines: tuple[int, int],
    share: float,
    reward: str,
    reward_s: float,
) -> None:
    num_engines, num_slots = engines
    places = {**PLACES[place], "reward_model": PLACES[place]["critic"]}
    run = timed_run(
        make_run, seed, schedule_of(mode), num_engines=num_engines, num_slots=num_slots, steps=3, save_every=1,
        pool_of=places, reward=reward,
    )  # fmt: skip
    run.world.share_of_mixed = share
    run.world.durations["reward"] = reward_s
    batches = watch_batches(run)

    await run()

    check_batches(run, batches, (1, 2, 3), share)
    sampler = DynamicSampler(SETTINGS["sampling"])
    for step in (1, 2, 3):
        sampler.observe(NUM_PROMPTS, int(run.monitor.records[step]["sampling/prompts"]))
    assert run.checkpoints.saved[3][0]["sampling"] == sampler.state_dict()


async def test_parts_whose_sources_of_scores_finish_in_other_orders_are_joined(make_run: MakeRun) -> None:
    run = timed_run(
        make_run, 1, schedule_of(ScheduleMode.OVERLAPPED), num_engines=2, num_slots=3, steps=2, reward="Both",
        pool_of={**SPLIT, "reward_model": SPLIT["critic"]},
    )  # fmt: skip
    run.world.durations = OfTurns(run.world.durations | {"reward_model": 1.0}, reward=(0.01, 50.0))
    batches = watch_batches(run)

    await run()

    check_batches(run, batches, (1, 2))


class OfTurns(dict[str, float]):
    """Durations, of which some are others at each call, in turn."""

    def __init__(self, durations: dict[str, float], **turns: tuple[float, ...]) -> None:
        super().__init__(durations)
        self._turns = {name: cycle(each) for name, each in turns.items()}

    def __getitem__(self, name: str) -> float:
        return next(self._turns[name]) if name in self._turns else super().__getitem__(name)


@pytest.mark.parametrize("seed", range(4))
async def test_a_killed_run_continues_with_the_same_batches(make_run: MakeRun, seed: int) -> None:
    def fresh(steps: int = 4, found: Restored[FakeBatch] | None = None) -> Run:
        schedule = schedule_of(ScheduleMode.OVERLAPPED)
        return timed_run(make_run, seed, schedule, num_engines=2, num_slots=3, steps=steps, save_every=1, found=found)

    whole = fresh()
    expected = watch_batches(whole)
    await whole()
    for number in range(1, 4):
        killed = fresh()
        end = whole.world.time.now * number / 4
        await killed.world.time.kill_at(end, killed.loop.run())
        if not killed.checkpoints.saved:
            continue
        last = max(killed.checkpoints.saved)
        state, actor, critic = killed.checkpoints.saved[last]

        rest = fresh(found=Restored(last, {"kl": state["kl"], **state}))
        rest.world.actor, rest.world.critic = actor, critic
        batches = watch_batches(rest)
        await rest()

        later = range(last + 1, 5)
        assert {step: batches[step].rows for step in later} == {step: expected[step].rows for step in later}
        assert rest.checkpoints.saved[4] == whole.checkpoints.saved[4]


async def test_engines_do_not_wait_for_the_end_of_a_round(make_run: MakeRun) -> None:
    seconds, idle = {}, {}
    for is_streamed in (False, True):
        schedule = replace(schedule_of(ScheduleMode.OVERLAPPED), streaming=is_streamed)
        run = timed_run(make_run, 1, schedule, num_engines=2, num_slots=4, steps=6, pool_of=PLACES["rollout apart"])
        run.world.durations["reward"] = 0.5
        batches = watch_batches(run)
        await run()
        check_batches(run, batches, range(1, 7))
        # From the first request of a step to the full batch.
        spans = [
            (run.world.at(f"prompts {n}", "start"), run.world.at(f"old_log_prob {n}", "start")) for n in range(1, 7)
        ]
        seconds[is_streamed] = sum(end - start for start, end in spans)
        idle[is_streamed] = 1 - engines_of(run).busy_s / (seconds[is_streamed] * 2 * 4)
    print(f"filling: {seconds[True] / seconds[False]:.2f} of the time, idle {idle[False]:.2f} -> {idle[True]:.2f}")

    assert seconds[True] < 0.8 * seconds[False]
    assert idle[True] < 0.8 * idle[False]


@pytest.mark.parametrize("suffix", ["", "_shared"])
@pytest.mark.parametrize("loses_rows", [False, True])
async def test_a_lost_engine_changes_no_batch(make_run: MakeRun, suffix: str, loses_rows: bool) -> None:
    pools, was_lost = {**SPLIT, "rollout_shared": "c"}, 0.0
    for exchange in range(1, 7):
        run = make_run(steps=3, pool_of=pools, shared=["rollout_shared"], settings=SETTINGS)
        run.world.losses[suffix, 0, 2] = Loss(4.0, loses_rows, exchange=exchange)
        run.world.durations["reward"] = 0.1
        batches = watch_batches(run)

        assert (await run()).is_finished

        check_batches(run, batches, (1, 2, 3))
        was_lost += run.monitor.records[2]["rollout/lost_engines"]
    assert was_lost > 2


async def test_sleeping_engines_get_the_same_weights_again(make_run: MakeRun) -> None:
    run = make_run(ScheduleMode.SERIAL, steps=2, settings=SETTINGS)
    run.world.engines_sleep = True

    await run()

    names = run.world.names()
    num_stretches = len([name for name in names if name.startswith("generate")])
    assert num_stretches > 2
    assert len([name for name in names if name.startswith("push")]) == num_stretches


async def test_other_phases_wait_for_the_full_batch(make_run: MakeRun) -> None:
    run = make_run(steps=1, settings=SETTINGS)

    await run()

    last = max(time for time, what, edge in run.world.events if (what, edge) == ("reward 1", "end"))
    assert run.world.at("old_log_prob 1", "start") >= last
    assert run.world.at("values 1", "start") >= last


async def test_a_limit_ends_the_run_by_name(make_run: MakeRun) -> None:
    run = make_run(steps=1, settings={"sampling": SamplingSettings(NUM_PROMPTS, NUM_ROWS, max_batches=3)})
    run.world.share_of_mixed = 0.0

    with pytest.raises(
        BatchNotFilledError, match=r"step 1: after 3 batches .* has 0 of 6 prompts .* only 0 of 18 prompts"
    ):
        await run()

    assert sum(data_of(run).counts[1]) == 3 * NUM_PROMPTS


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([0.0, 1.0], True), ([1.0, 1.0], False), ([0.0, -0.0], False), ([0.0, None], False), ([0.5, None, 0.25], True)],
)
def test_a_group_needs_two_different_scores(scores: list[float | None], expected: bool) -> None:
    assert is_mixed(scores) is expected


def candidates(sampler: DynamicSampler, known: Mapping[int, bool], requested: int) -> Candidates:
    found = Candidates(sampler)
    found.add(requested)
    for prompt, differs in known.items():
        found.learn((2 * prompt, 2 * prompt + 1), (0.0, float(differs)))
    return found


def test_a_later_prompt_counts_only_when_all_earlier_ones_are_known() -> None:
    sampler = DynamicSampler(SamplingSettings(2, 2, 5))
    found = candidates(sampler, {1: True, 2: True}, 4)
    assert found.chosen() == []

    found.learn((0,), (1.0,))
    assert not found.is_full, "one of two responses is known"
    found.learn((1,), (0.0,))
    assert found.chosen() == [0, 1]
    found.forget([1])
    assert found.chosen() == []
    found.learn((1,), (1.0,))
    assert found.chosen() == [1, 2]


def test_what_is_expected_to_be_missing_is_requested() -> None:
    sampler = DynamicSampler(SamplingSettings(10, 2, 5))
    assert candidates(sampler, {}, 0).missing() == 10
    assert candidates(sampler, {}, 10).missing() == 0
    # The share (4 + 0) / (4 + 4) is kept of the other 6, so 3 of 10, and 7 / 0.5 are missing.
    assert candidates(sampler, dict.fromkeys(range(4), False), 10).missing() == 14
    # (4 + 7) / (4 + 8) of 2: fewer than 8 prompts are not requested.
    assert candidates(sampler, {prompt: prompt > 0 for prompt in range(8)}, 10).missing() == 8
    assert candidates(sampler, {prompt: prompt > 0 for prompt in range(8)}, 46).missing() == 0
    # At most 5 times 10.
    assert candidates(sampler, dict.fromkeys(range(46), False), 46).missing() == 4
    assert candidates(sampler, dict.fromkeys(range(50), False), 50).is_exhausted

    sampler.observe(10, 20)
    # (0.5 * 8 + 10) / (0.5 * 8 + 20) = 7 / 12.
    assert candidates(sampler, {}, 0).missing() == 18
    other = DynamicSampler(SamplingSettings(10, 2, 5))
    other.load_state_dict(sampler.state_dict())
    assert candidates(other, {}, 0).missing() == 18


@pytest.mark.parametrize("engines_sleep", [False, True])
async def test_each_step_has_the_version_of_the_last_compared_weights(make_run: MakeRun, engines_sleep: bool) -> None:
    run = make_run(ScheduleMode.SERIAL, steps=3, settings=SETTINGS)
    run.world.engines_sleep = engines_sleep
    await run()

    compared = [run.monitor.records[step]["training/compared_weights_version"] for step in (1, 2, 3)]
    assert compared == [1, 2, 3]
