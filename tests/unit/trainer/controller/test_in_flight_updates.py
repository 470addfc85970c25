"""OneStepOff with weights that are updated in flight: when they are sent, how old they are, and what a stop keeps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.controller.cost_model import fit
from ppojob_trainer.controller.prediction import observations, predict
from ppojob_trainer.controller.schedule import Schedule, schedule_of
from ppojob_trainer.controller.step_time import Layout
from tests.unit.trainer.controller.conftest import MakeRun, Run, StopAt
from tests.unit.trainer.controller.fake_world import DURATIONS, Loss
from tests.unit.trainer.controller.test_one_step_off import MOST, POOLS, STEPS, check_kills, newest, off, resumed

ALL = range(1, STEPS + 1)


def in_flight(max_staleness: int) -> Schedule:
    return replace(schedule_of(ScheduleMode.ONE_STEP_OFF), max_staleness=max_staleness, in_flight=True)


def metrics_of(run: Run, name: str, steps: range = ALL) -> list[float]:
    return [run.monitor.records[step][name] for step in steps]


@pytest.mark.parametrize("most", MOST)
async def test_a_push_waits_for_no_response(make_run: MakeRun, most: int) -> None:
    now, waiting = (make_run(schedule, steps=5, pool_of=POOLS) for schedule in (in_flight(most), off(most)))
    for run in (now, waiting):
        run.world.durations["generate"] = 30.0
        await run()

    for step in range(1, 5):
        assert now.world.at(f"push {step}", "start") == now.world.at(f"update_actor {step}", "end")
    assert now.world.overlap("push 1", "generate 2")
    first = next(name for name in waiting.world.names() if name.startswith("push"))
    assert not any(waiting.world.overlap(first, f"generate {step}") for step in range(1, 6))


async def test_a_generation_that_a_push_interrupts_takes_longer_by_the_push(make_run: MakeRun) -> None:
    run = make_run(in_flight(1), steps=6, pool_of=POOLS)
    run.world.durations |= {"generate": 30.0, "push": 4.0}

    await run()

    for step in (3, 4):
        taken = run.world.at(f"generate {step}", "end") - run.world.at(f"generate {step}", "start")
        assert taken == pytest.approx(34.0)
        assert run.monitor.records[step]["rollout/paused_s"] == pytest.approx(4.0)
        assert run.monitor.records[step]["timing_s/step"] == pytest.approx(34.0 + DURATIONS["prompts"])
    assert run.monitor.records[1]["rollout/paused_s"] == 0


@pytest.mark.parametrize("most", MOST)
async def test_no_response_begins_with_older_weights_than_allowed(make_run: MakeRun, most: int) -> None:
    reached = 0.0
    for seed in range(12):
        run = make_run(
            in_flight(most), steps=STEPS, pool_of=POOLS if seed % 2 else {**POOLS, "critic": "a"},
            validate_every=seed % 3, save_every=seed % 4, write_s=3.0 if seed > 6 else None,
        )  # fmt: skip
        generator = random.Random(seed)
        run.world.durations.update({name: 10 ** generator.uniform(-1, 1) for name in run.world.durations})

        await run()

        assert run.world.trained == [(step, step) for step in ALL]
        assert max(metrics_of(run, "staleness/max")) <= most
        reached = max(reached, *metrics_of(run, "staleness/max"))
        oldest = metrics_of(run, "staleness/oldest_version")
        assert run.world.generated == {step: run.world.actors[int(v)] for step, v in zip(ALL, oldest, strict=True)}
    assert reached == most, "a fast rollout uses what it is allowed"


async def test_responses_have_newer_weights_than_with_updates_between_generations(make_run: MakeRun) -> None:
    mixed, apart = (make_run(schedule, steps=STEPS, pool_of=POOLS) for schedule in (in_flight(3), off(3)))
    for run in (mixed, apart):
        run.world.durations["generate"] = 25.0
        await run()

    assert sum(metrics_of(mixed, "staleness/mean")) < sum(metrics_of(apart, "staleness/mean"))
    assert metrics_of(mixed, "staleness/mixed_samples_fraction")[2:] == [1.0] * (STEPS - 2)
    assert all(0 < share < 1 for share in metrics_of(mixed, "staleness/newer_tokens_fraction")[2:])
    assert "staleness/mixed_samples_fraction" not in apart.monitor.records[3]


@pytest.mark.parametrize("write_s", [None, 9.0])
@pytest.mark.parametrize("most", MOST)
async def test_a_run_that_is_killed_anywhere_trains_each_prompt_once(
    make_run: MakeRun, most: int, write_s: float | None
) -> None:
    def check(_: Run, killed: Run, step: int, after: Run) -> None:
        assert_nothing_is_lost(killed, step, after, most)

    await check_kills(make_run, in_flight(most), write_s, check)


def assert_nothing_is_lost(before: Run, step: int, after: Run, most: int) -> None:
    """The two attempts train each prompt once, in order, and those that were saved from the saved responses."""
    trained = [*(each for each in before.world.trained if each[0] <= step), *after.world.trained]
    assert trained == [(number, number) for number in ALL]
    assert max(metrics_of(after, "staleness/max", range(step + 1, STEPS + 1)), default=0) <= most
    saved = newest(before)
    versions = [] if saved is None else saved.found.state.get("queue", {"versions": []})["versions"]
    for number, version in enumerate(versions, start=step + 1):
        assert number not in after.world.generated, "a saved response was generated again"
        assert after.monitor.records[number]["staleness/oldest_version"] == version


@pytest.mark.parametrize("most", MOST)
async def test_a_graceful_stop_anywhere_loses_nothing(make_run: MakeRun, stop_at: StopAt, most: int) -> None:
    whole = make_run(in_flight(most), steps=STEPS, save_every=3, pool_of=POOLS)
    await whole()
    for name in dict.fromkeys(name for name in whole.world.names() if name not in ("validate", "export")):
        stopped = make_run(in_flight(most), steps=STEPS, pool_of=POOLS)
        if (await stop_at(stopped, name)).is_finished:
            continue

        step, after = await resumed(make_run, stopped, in_flight(most))

        assert_nothing_is_lost(stopped, step, after, most)


@pytest.mark.parametrize("schedules", [(in_flight(3), off(1)), (off(3), in_flight(1)), (off(2), in_flight(2))])
async def test_a_checkpoint_can_be_continued_with_the_other_updates(
    make_run: MakeRun, stop_at: StopAt, schedules: tuple[Schedule, Schedule]
) -> None:
    first = make_run(schedules[0], steps=STEPS, pool_of=POOLS)
    assert not (await stop_at(first, "update_actor 5")).is_finished

    step, second = await resumed(make_run, first, schedules[1])

    assert second.world.trained == [(number, number) for number in range(step + 1, STEPS + 1)]
    assert max(metrics_of(second, "staleness/max", range(step + 1, STEPS + 1))) <= schedules[1].max_staleness


async def test_an_engine_that_a_push_admits_in_the_middle_of_a_generation_takes_samples(make_run: MakeRun) -> None:
    run = make_run(in_flight(1), steps=4, pool_of=POOLS)
    # The only engine is lost in the second generation, after the first push has admitted another one.
    run.world.durations["generate"] = 40.0
    run.world.joins[""] = [45.0]
    run.world.losses["", 0, 2] = Loss(after_s=35.0)

    await run()

    assert run.world.trained == [(step, step) for step in range(1, 5)]
    assert {engine for _, engine, step, _ in run.world.written if step > 1} == {1}
    assert metrics_of(run, "rollout/repeated_samples", range(1, 4)) == [0, 2, 0]


async def test_weights_that_did_not_change_in_the_warmup_are_not_old(make_run: MakeRun) -> None:
    run = make_run(in_flight(1), steps=6, pool_of=POOLS, settings={"critic_warmup_steps": 4})

    await run()

    assert [name for name in run.world.names() if name.startswith("push")] == ["push 5", "push 6"]
    assert max(metrics_of(run, "staleness/max", range(1, 7))) <= 1


@pytest.mark.parametrize(("generate", "push"), [(30.0, 4.0), (10.0, 4.0), (3.0, 1.0)])
async def test_the_time_of_a_step_follows_from_what_its_phases_took(
    make_run: MakeRun, generate: float, push: float
) -> None:
    run = make_run(in_flight(2), steps=12, pool_of=POOLS)
    run.world.durations |= {"generate": generate, "push": push}
    await run()
    records = [run.monitor.records[step] for step in range(5, 10)]
    gpus = {role: pool for role, pool in POOLS.items() if role not in ("data", "reward")}
    layout = Layout(gpus, dict.fromkeys("arc", 1), in_flight(2))

    found = predict(fit(observations(records, layout)), layout)

    assert found.seconds == pytest.approx(records[2]["timing_s/step"])
