"""OneStepOff: what runs at the same time, how old the weights are, and that neither time nor kills change a number."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.schedule import Schedule, schedule_of
from ppojob_trainer.controller.storage_ports import Restored
from tests.unit.trainer.controller.conftest import MakeRun, Run, StopAt
from tests.unit.trainer.controller.fake_world import DURATIONS, FakeBatch
from tests.unit.trainer.controller.test_pools_take_turns import TIMES

POOLS = {"data": "a", "actor": "a", "rollout": "r", "ref": "a", "critic": "c", "reward": "c"}
MOST = range(1, 5)
STEPS = 11
KILL_STRIDE = 1 if "PPOJOB_FUZZ" in os.environ else 3
"""Of the moments at which a run is killed: `make fuzz` tries all, `make test` each third of each staleness."""


def off(max_staleness: int) -> Schedule:
    return replace(schedule_of(ScheduleMode.ONE_STEP_OFF), max_staleness=max_staleness)


def numbers(run: Run) -> object:
    records = {
        step: {name: value for name, value in record.items() if not name.startswith(TIMES)}
        for step, record in run.monitor.records.items()
    }
    return records, run.world.actor, run.world.critic


async def test_the_next_step_is_generated_while_this_one_is_trained(make_run: MakeRun) -> None:
    run = make_run(off(1), steps=4, pool_of=POOLS)

    await run()

    world = run.world
    for step in (2, 3):
        for phase in ("old_log_prob", "values", "update_actor", "update_critic"):
            assert world.overlap(f"generate {step + 1}", f"{phase} {step}"), (phase, step)
        assert not world.overlap(f"push {step}", f"generate {step + 1}"), "weights change between generations"
    assert world.at("generate 3", "start") == world.at("push 1", "end") + DURATIONS["prompts"]


async def test_responses_are_scored_as_they_finish_while_the_step_before_is_trained(make_run: MakeRun) -> None:
    run = make_run(off(1), steps=5, pool_of=POOLS)
    run.world.durations |= {"reward": 8.0, "update_actor": 12.0}

    await run()

    world = run.world
    for step in (2, 3, 4):
        assert world.at(f"reward {step + 1}", "start") < world.at(f"generate {step + 1}", "end"), (
            "with the first response"
        )
        assert world.at(f"reward {step + 1}", "end") < world.at(f"old_log_prob {step + 1}", "start")
        # These are in the pools of models that the step before changes.
        for phase in ("old_log_prob", "values", "ref"):
            assert world.at(f"{phase} {step + 1}", "start") >= world.at(f"push {step}", "end"), phase


@pytest.mark.parametrize("pool", ["f", "c"])
async def test_a_reference_follows_the_responses_if_no_model_of_its_pool_is_trained(
    make_run: MakeRun, pool: str
) -> None:
    run = make_run(off(1), steps=5, pool_of={**POOLS, "ref": pool})
    run.world.durations["update_actor"] = 12.0

    await run()

    early = run.world.at("ref 4", "start") < run.world.at("push 3", "start")
    assert early is (pool == "f")


async def test_scores_of_a_later_step_that_fail_end_the_run_when_they_are_needed(make_run: MakeRun) -> None:
    run = make_run(off(1), steps=5, pool_of=POOLS)
    run.world.failing["reward 3"] = RuntimeError("no such test")

    with pytest.raises(RuntimeError, match="no such test"):
        await run()

    assert [step for step, _ in run.world.trained] == [1, 2]


@pytest.mark.parametrize("most", MOST)
async def test_no_response_is_older_than_allowed_and_none_is_trained_out_of_order(make_run: MakeRun, most: int) -> None:
    run = make_run(off(most), steps=STEPS, pool_of=POOLS)

    await run()

    ages = [run.monitor.records[step]["staleness/max"] for step in range(1, STEPS + 1)]
    versions = [run.monitor.records[step]["staleness/oldest_version"] for step in range(1, STEPS + 1)]
    # The engines get new weights every `most` steps, and those are used from the step after the next on.
    assert versions == [0, *(most * ((step - 2) // most) for step in range(2, STEPS + 1))]
    assert ages == [step - 1 - version for step, version in enumerate(versions, start=1)]
    assert max(ages) == most
    assert run.world.generated == {step: run.world.actors[int(v)] for step, v in enumerate(versions, start=1)}
    assert run.world.trained == [(step, step) for step in range(1, STEPS + 1)]


async def test_without_staleness_it_is_the_serial_order(make_run: MakeRun) -> None:
    stale, serial = (
        make_run(schedule, steps=4, validate_every=2, pool_of=POOLS)
        for schedule in (off(0), schedule_of(ScheduleMode.SERIAL))
    )

    await stale()
    await serial()

    assert numbers(stale) == numbers(serial)
    assert {record["staleness/max"] for step, record in stale.monitor.records.items() if step} == {0.0}


async def test_a_stale_run_has_other_numbers(make_run: MakeRun) -> None:
    runs = [make_run(off(most), steps=STEPS, pool_of=POOLS) for most in range(5)]
    for run in runs:
        await run()

    assert len({run.world.actor for run in runs}) == 5


@pytest.mark.parametrize("most", MOST)
async def test_the_numbers_depend_on_no_duration_validation_or_checkpoint(make_run: MakeRun, most: int) -> None:
    plain = make_run(off(most), steps=STEPS, pool_of=POOLS)
    await plain()
    for seed in range(8):
        validate_every, save_every = seed % 3, seed % 4
        pools = POOLS if seed % 2 else {**POOLS, "critic": "a"}
        run = make_run(
            off(most), steps=STEPS, pool_of=pools, validate_every=validate_every, save_every=save_every,
            write_s=3.0 if seed > 4 else None,
        )  # fmt: skip
        generator = random.Random(seed)
        run.world.durations.update({name: 10 ** generator.uniform(-1, 1) for name in run.world.durations})

        await run()

        assert (run.world.actor, run.world.critic) == (plain.world.actor, plain.world.critic)
        assert run.world.generated == plain.world.generated


@pytest.mark.parametrize("most", MOST)
async def test_weights_wait_for_a_generation_that_waits_for_its_prompts(make_run: MakeRun, most: int) -> None:
    plain, slow = (make_run(off(most), steps=STEPS, pool_of=POOLS) for _ in range(2))
    slow.world.durations["prompts"] = 100.0

    await plain()
    await slow()

    assert slow.world.generated == plain.world.generated


@pytest.mark.parametrize("most", MOST)
async def test_validation_is_that_of_the_weights_of_its_step(make_run: MakeRun, most: int) -> None:
    stale = make_run(off(most), steps=5, validate_every=1, pool_of=POOLS)
    validated: list[float] = []
    begin = stale.world.phase

    async def watched(what: str, step: int = 0, num_rows: int | None = None) -> None:
        if what == "validate":
            validated.append(stale.world.rollout)
        await begin(what, step, num_rows)

    stale.world.phase = watched  # type: ignore[method-assign]

    await stale()

    assert validated == [stale.world.actors[step] for step in range(6)]


async def test_a_step_takes_as_long_as_the_longer_of_generation_and_training(make_run: MakeRun) -> None:
    for generate, expected in ((30.0, 30.0 + 1 + 0.1), (1.0, 3 + 1 + 0.5 + 5 + 1)):
        run = make_run(off(1), steps=6, pool_of=POOLS, has_critic=False)
        run.world.durations["generate"] = generate

        await run()

        assert run.monitor.records[4]["timing_s/step"] == pytest.approx(expected)


async def test_weights_of_the_warmup_are_not_sent(make_run: MakeRun) -> None:
    run = make_run(off(1), steps=4, pool_of=POOLS, settings={"critic_warmup_steps": 2})

    await run()

    assert [name for name in run.world.names() if name.startswith("push")] == ["push 3", "push 4"]
    assert run.monitor.records[4]["staleness/oldest_version"] == 2


async def test_user_workers_get_the_steps_in_order(make_run: MakeRun) -> None:
    run = make_run(off(2), steps=4, pool_of={**POOLS, "shaper": "c"}, hooks=list(HookPoint))

    await run()

    calls = [name for name in run.world.names() if name.startswith("hook_")]
    assert calls == [f"hook_{point.value} {step}" for step in range(1, 5) for point in HookPoint]


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint of a run."""

    step: int
    found: Restored[FakeBatch]
    actor: float
    critic: float


def newest(run: Run) -> Saved | None:
    if not run.checkpoints.saved:
        return None
    step = max(run.checkpoints.saved)
    state, actor, critic = run.checkpoints.saved[step]
    # As the manifest has it.
    state = json.loads(json.dumps(state))
    return Saved(step, Restored(step, state, run.checkpoints.batches[step]), actor, critic)


async def resumed(make_run: MakeRun, before: Run, schedule: Schedule, steps: int = STEPS) -> tuple[int, Run]:
    """Run to the end from the newest checkpoint; return its step too."""
    saved = newest(before)
    run = make_run(schedule, steps=steps, save_every=3, pool_of=POOLS, found=None if saved is None else saved.found)
    if saved is not None:
        run.world.actor, run.world.critic = saved.actor, saved.critic
        run.world.actors[saved.step] = saved.actor
    assert (await run()).is_finished
    return 0 if saved is None else saved.step, run


def assert_continues(whole: Run, before: Run, step: int, after: Run) -> None:
    """The two attempts together are the run that was not interrupted."""
    trained = [*(each for each in before.world.trained if each[0] <= step), *after.world.trained]
    assert trained == [(number, number) for number in range(1, STEPS + 1)]
    assert (after.world.actor, after.world.critic) == (whole.world.actor, whole.world.critic)
    for number in range(step + 1, STEPS + 1):
        ours, theirs = (
            {
                name: value
                for name, value in run.monitor.records[number].items()
                # The resumed attempt begins with a push, which the whole run does later with a large staleness.
                if not name.startswith(TIMES) and name != "training/compared_weights_version"
            }
            for run in (after, whole)
        )
        assert ours == theirs, number


@pytest.mark.parametrize("write_s", [None, 9.0])
@pytest.mark.parametrize("most", MOST)
async def test_a_run_that_is_killed_anywhere_continues_exactly(
    make_run: MakeRun, most: int, write_s: float | None
) -> None:
    await check_kills(make_run, off(most), write_s, assert_continues)


async def check_kills(
    make_run: MakeRun, schedule: Schedule, write_s: float | None, check: Callable[[Run, Run, int, Run], None]
) -> None:
    """Kill a run at moments of it and resume it; `check` gets the whole run, the killed one, the step, the next."""
    whole = make_run(schedule, steps=STEPS, save_every=3, pool_of=POOLS, write_s=write_s)
    await whole()
    # Another start for each staleness, so that together they try all moments of a step.
    moments = sorted({time for time, _, _ in whole.world.events})[schedule.max_staleness % KILL_STRIDE :: KILL_STRIDE]
    with_queue = 0
    for moment in moments:
        killed = make_run(schedule, steps=STEPS, save_every=3, pool_of=POOLS, write_s=write_s)
        await killed.world.time.kill_at(moment, killed.loop.run())

        step, after = await resumed(make_run, killed, schedule)

        check(whole, killed, step, after)
        with_queue += bool(killed.checkpoints.batches.get(step))
    assert with_queue > len(moments) / 3, "the saved responses were used"


@pytest.mark.parametrize("most", MOST)
async def test_a_graceful_stop_anywhere_loses_nothing(make_run: MakeRun, stop_at: StopAt, most: int) -> None:
    whole = make_run(off(most), steps=STEPS, save_every=3, pool_of=POOLS)
    await whole()
    for name in dict.fromkeys(name for name in whole.world.names() if name not in ("validate", "export")):
        stopped = make_run(off(most), steps=STEPS, pool_of=POOLS)
        if (await stop_at(stopped, name)).is_finished:
            continue

        step, after = await resumed(make_run, stopped, off(most))

        assert_continues(whole, stopped, step, after)


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (4, 1), (1, 4), (3, 2)])
async def test_a_checkpoint_can_be_continued_with_another_staleness(
    make_run: MakeRun, stop_at: StopAt, before: int, after: int
) -> None:
    """As `checkpoint.resumeFrom` of another job may do."""
    first = make_run(off(before), steps=STEPS, pool_of=POOLS)
    assert not (await stop_at(first, "update_actor 5")).is_finished

    step, second = await resumed(make_run, first, off(after))

    assert step == 5
    assert second.world.trained == [(number, number) for number in range(6, STEPS + 1)]
    assert max(second.monitor.records[number]["staleness/max"] for number in range(6, STEPS + 1)) <= after


async def test_a_longer_run_generates_the_steps_that_were_not_known_before(make_run: MakeRun) -> None:
    run = make_run(off(3), steps=4, pool_of=POOLS)
    begin = run.world.phase

    async def watched(what: str, step: int = 0, num_rows: int | None = None) -> None:
        if (what, step) == ("update_actor", 4):
            run.monitor.settings = run.monitor.settings.model_copy(update={"total_steps": 9})
        await begin(what, step, num_rows)

    run.world.phase = watched  # type: ignore[method-assign]

    await run()

    assert run.world.trained == [(step, step) for step in range(1, 10)]
    assert max(run.monitor.records[step]["staleness/max"] for step in range(1, 10)) <= 3
