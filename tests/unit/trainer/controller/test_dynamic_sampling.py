"""Dynamic sampling: full batches of prompts whose scores differ, the same in every schedule and after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.controller.dynamic_sampling import Candidates, DynamicSampler, SamplingSettings, is_mixed
from ppojob_trainer.controller.errors import BatchNotFilledError
from ppojob_trainer.controller.storage_ports import Restored
from tests.unit.trainer.controller.conftest import MakeRun, Run
from tests.unit.trainer.controller.fake_ports import FakeData
from tests.unit.trainer.controller.fake_world import NUM_ROWS, FakeBatch, number_of

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


async def test_a_batch_has_the_first_prompts_whose_scores_differ(make_run: MakeRun) -> None:
    run = make_run(steps=3, settings=SETTINGS)
    batches = watch_batches(run)

    await run()

    last = -1
    for step in (1, 2, 3):
        prompts = [prompt for prompt, _ in batches[step].rows[::NUM_ROWS]]
        assert len(batches[step]) == NUM_PROMPTS * NUM_ROWS
        assert batches[step].rows == tuple((prompt, sample) for prompt in prompts for sample in range(NUM_ROWS))
        generated = range(last + 1, data_of(run).positions[step])
        mixed = [prompt for prompt in generated if number_of("mixed", prompt) < 0.5]
        assert prompts == mixed[:NUM_PROMPTS], "the others of the step are dropped"
        last = data_of(run).positions[step] - 1
        record = run.monitor.records[step]
        assert record["sampling/rounds"] == len(data_of(run).counts[step])
        assert record["sampling/prompts"] == len(generated)
        assert record["sampling/kept_share"] == len(mixed) / len(generated)


async def test_a_resumed_run_generates_the_same(make_run: MakeRun) -> None:
    whole = make_run(steps=4, save_every=1, settings=SETTINGS)
    await whole()

    first = make_run(steps=2, save_every=1, settings=SETTINGS)
    await first()
    state, actor, critic = first.checkpoints.saved[2]
    rest = make_run(steps=4, save_every=1, settings=SETTINGS, found=Restored(2, {"kl": state["kl"], **state}))
    rest.world.actor, rest.world.critic = actor, critic
    await rest()

    records, *_, saved, counts = numbers_of(whole)
    of_rest = numbers_of(rest)
    assert of_rest[-1] == {step: counts[step] for step in (3, 4)}
    assert {step: of_rest[0][step] for step in (3, 4)} == {step: records[step] for step in (3, 4)}
    assert rest.checkpoints.saved[4] == saved[4]


async def test_sleeping_engines_get_the_same_weights_again(make_run: MakeRun) -> None:
    run = make_run(ScheduleMode.SERIAL, steps=2, settings=SETTINGS)
    run.world.engines_sleep = True

    await run()

    counts = data_of(run).counts
    extra = sum(len(rounds) - 1 for rounds in counts.values())
    assert extra > 0
    assert len([name for name in run.world.names() if name.startswith("push")]) == extra + 2


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
        BatchNotFilledError, match=r"step 1: after 3 times .* has 0 of 6 prompts .* only 0 of 54 prompts"
    ):
        await run()

    # 6 prompts, then four times those that are missing, as no share is known to be kept.
    assert data_of(run).counts == {1: [6, 24, 24]}


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.0, 1.0, 1.0, 1.0, 0.0, 0.0], [0]),
        ([0.0, None, 1.0, None, None, None], []),
        ([0.5, 0.25, 1.0, None, 0.0, -0.0], [0]),
    ],
)
def test_a_group_needs_two_different_scores(scores: list[float | None], expected: list[int]) -> None:
    assert mixed_groups(scores, 2) == expected


