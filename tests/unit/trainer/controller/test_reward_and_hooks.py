"""When rewards are computed, and where a step calls the users' own workers."""

import pytest

from ppojob_api.v1alpha1.training import Overlap, ScheduleMode
from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.schedule import schedule_of
from tests.unit.trainer.controller.conftest import SPLIT, MakeRun

SERIAL, PARALLEL, OVERLAPPED = ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED
ALL_POINTS = tuple(HookPoint)


async def test_function_and_model_score_at_the_same_time_as_old_log_prob(make_run: MakeRun) -> None:
    schedule = schedule_of(OVERLAPPED, [Overlap.STREAMING])
    run = make_run(schedule, steps=1, reward="Both", pool_of={**SPLIT, "reward_model": "r"})

    await run()

    world = run.world
    assert world.overlap("reward 1", "reward_model 1")
    assert world.overlap("reward_model 1", "old_log_prob 1")
    assert world.overlap("reward_model 1", "values 1"), "a pool of its own waits for no critic"
    assert run.monitor.records[1]["reward/model/mean"] > 0


async def test_in_the_critics_pool_the_model_takes_its_turn(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=1, reward="Both")

    await run()

    world = run.world
    assert world.at("values 1", "end") <= world.at("ref 1", "start")
    assert world.at("ref 1", "end") <= world.at("reward_model 1", "start")
    assert world.overlap("reward 1", "values 1"), "the function takes no GPU"


async def test_serial_runs_both_ways_of_scoring_apart(make_run: MakeRun) -> None:
    run = make_run(SERIAL, steps=1, reward="Both")

    await run()

    assert run.world.names() == run.world.names("end")
    assert {"reward 1", "reward_model 1"} <= set(run.world.names())


async def test_a_model_alone_needs_no_function(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=1, reward="Model")

    await run()

    assert "reward 1" not in run.world.names()
    assert run.monitor.records[1]["reward_model/seen"] == 1
    assert "timing_s/reward_model" in run.monitor.records[1]


@pytest.mark.parametrize("mode", [SERIAL, PARALLEL])
async def test_hooks_stand_where_their_points_say(make_run: MakeRun, mode: ScheduleMode) -> None:
    run = make_run(mode, steps=1, hooks=ALL_POINTS)

    await run()

    names = run.world.names()
    assert names.index("generate 1") + 1 == names.index("hook_Generate 1")
    assert names.index("hook_Score 1") + 1 == names.index("advantages 1")
    assert names.index("push 1") + 1 == names.index("hook_Step 1")
    record = run.monitor.records[1]
    assert record["shaper/Step"] > record["shaper/Score"] > record["shaper/Generate"]
    assert "timing_s/hook_shaper" in record


async def test_scores_that_a_hook_replaced_reach_the_advantages(make_run: MakeRun) -> None:
    plain, shaped = make_run(steps=1), make_run(steps=1, hooks=[HookPoint.SCORE])

    await plain()
    await shaped()

    scores = [run.monitor.records[1]["critic/score/mean"] for run in (plain, shaped)]
    assert scores[0] != scores[1]


async def test_in_overlapped_a_slow_hook_after_step_does_not_keep_the_next_generation(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=2, hooks=ALL_POINTS)
    run.world.durations["hook_Step"] = 30.0

    await run()

    world = run.world
    assert world.overlap("hook_Step 1", "generate 2")
    assert world.at("hook_Step 1", "end") <= world.at("hook_Generate 2", "start"), "a worker sees the steps in order"
    assert "shaper/Step" in run.monitor.records[1]


async def test_all_modes_give_the_same_numbers_with_hooks(make_run: MakeRun) -> None:
    records = []
    for mode in (SERIAL, PARALLEL, OVERLAPPED):
        run = make_run(mode, steps=3, reward="Both", hooks=ALL_POINTS)
        await run()
        skipped = ("timing", "perf/", "pool/", "overlap/")
        records.append(
            {
                step: {name: value for name, value in record.items() if not name.startswith(skipped)}
                for step, record in run.monitor.records.items()
            }
        )

    assert records[0] == records[1] == records[2]


@pytest.mark.parametrize("point", ALL_POINTS)
async def test_a_hook_that_fails_ends_the_run(make_run: MakeRun, point: HookPoint) -> None:
    run = make_run(OVERLAPPED, steps=3, hooks=[point])
    run.world.failing[f"hook_{point.value}"] = ZeroDivisionError("in the user's code")

    with pytest.raises(ZeroDivisionError, match="in the user's code"):
        await run()

    assert "save 3" not in run.world.names()


async def test_a_stop_while_the_values_wait_leaves_the_critics_update_alone(make_run: MakeRun, stop_at) -> None:
    run = make_run(OVERLAPPED, steps=3)
    run.world.durations["update_critic"] = 40.0

    outcome = await stop_at(run, "old_log_prob 2")

    assert (outcome.step, outcome.is_finished) == (1, False)
    assert run.world.at("update_critic 1", "end") <= run.world.at("save 1", "start")
