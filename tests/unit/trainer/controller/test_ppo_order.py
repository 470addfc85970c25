"""In which order, and at the same time as what, the phases of a step run."""

import pytest

from ppojob_api.v1alpha1.training import Overlap, ScheduleMode
from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.schedule import schedule_of
from tests.unit.trainer.controller.conftest import MakeRun
from tests.unit.trainer.controller.fake_world import DURATIONS

SERIAL, PARALLEL, OVERLAPPED = ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED
WHOLE = schedule_of(OVERLAPPED, [Overlap.STREAMING])
"""Every phase gets all responses at once."""


async def test_serial_runs_one_phase_after_the_other(make_run: MakeRun) -> None:
    run = make_run(SERIAL, steps=1)

    await run()

    assert run.world.names() == run.world.names("end")
    assert run.world.names() == [
        "prompts 1",
        "generate 1",
        "reward 1",
        "old_log_prob 1",
        "values 1",
        "ref 1",
        "advantages 1",
        "update_critic 1",
        "update_actor 1",
        "push 1",
        "save 1",
        "export",
    ]


async def test_parallel_update_overlaps_the_two_updates_and_nothing_else(make_run: MakeRun) -> None:
    run = make_run(PARALLEL, steps=2)

    await run()

    world = run.world
    assert world.overlap("update_actor 1", "update_critic 1")
    assert not world.overlap("old_log_prob 1", "values 1")
    assert world.at("push 1", "start") >= world.at("update_critic 1", "end")
    assert world.at("generate 2", "start") >= world.at("push 1", "end")


async def test_overlapped_computes_values_and_reward_beside_old_log_prob(make_run: MakeRun) -> None:
    run = make_run(WHOLE, steps=1)

    await run()

    world = run.world
    generated = world.at("generate 1", "end")
    assert world.at("values 1", "start") == world.at("reward 1", "start") == generated
    assert world.at("old_log_prob 1", "start") == generated
    assert world.at("ref 1", "start") == world.at("values 1", "end"), "ref shares the critic's pool"


async def test_overlapped_puts_ref_after_old_log_prob_where_it_is_in_the_actors_pool(make_run: MakeRun) -> None:
    pools = {"data": "a", "actor": "a", "rollout": "a", "ref": "a", "critic": "c", "reward": "c"}
    run = make_run(WHOLE, steps=1, pool_of=pools)

    await run()

    assert run.world.at("ref 1", "start") == run.world.at("old_log_prob 1", "end")
    assert run.world.overlap("ref 1", "reward 1") is False
    assert run.world.overlap("old_log_prob 1", "values 1")


async def test_overlapped_computes_on_finished_responses_while_others_are_written(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=1)

    await run()

    world, half = run.world, run.world.at("generate 1", "start") + DURATIONS["generate"] / 2
    assert world.at("values 1", "start") == world.at("reward 1", "start") == half
    assert world.overlap("ref 1", "generate 1")
    assert [name for name in world.names() if name in ("values 1", "ref 1")] == ["values 1", "ref 1"] * 2
    assert world.at("old_log_prob 1", "start") == world.at("generate 1", "end"), "it is in the rollout's pool"


async def test_a_chain_takes_all_that_came_while_it_was_busy_at_once(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=2)
    run.world.durations["update_critic"] = 100.0

    await run()

    assert run.world.names().count("values 2") == 1, "both parts waited for the critic"
    assert run.world.names().count("reward 2") == 2, "the reward function waits for nobody"


async def test_phases_in_the_rollouts_pool_wait_for_its_end(make_run: MakeRun) -> None:
    pools = {"data": "a", "actor": "a", "rollout": "a", "ref": "a", "critic": "c", "reward": "c"}
    run = make_run(OVERLAPPED, steps=1, pool_of=pools)

    await run()

    assert run.world.at("ref 1", "start") >= run.world.at("generate 1", "end")
    assert run.world.overlap("values 1", "generate 1")


async def test_with_a_separate_pool_the_rollout_streams_to_the_actor_too(make_run: MakeRun) -> None:
    pools = {"data": "a", "actor": "a", "rollout": "r", "ref": "a", "critic": "c", "reward": "c"}
    run = make_run(OVERLAPPED, steps=1, pool_of=pools)

    await run()

    assert run.world.overlap("old_log_prob 1", "generate 1")


SHARED = {"data": "a", "actor": "a", "rollout": "a", "rollout_shared": "c", "critic": "c", "ref": "c", "reward": "c"}


@pytest.mark.parametrize(
    ("slow", "waits", "goes_on"), [("", "old_log_prob", "values"), ("_shared", "values", "old_log_prob")]
)
async def test_a_pool_whose_engines_are_done_continues_while_those_of_another_generate(
    make_run: MakeRun, slow: str, waits: str, goes_on: str
) -> None:
    run = make_run(OVERLAPPED, steps=2, pool_of=SHARED, shared=["rollout_shared"])
    first, last = (f"generate{suffix} 1" for suffix in sorted(("", "_shared"), key=lambda suffix: suffix == slow))
    run.world.durations[f"generate{slow}"] = 40.0

    await run()

    world = run.world
    assert world.at(f"{goes_on} 1", "start") == world.at(first, "end")
    assert world.overlap(f"{goes_on} 1", last)
    assert world.at(f"{waits} 1", "start") == world.at(last, "end")
    assert [world.names().count(f"{phase} 1") for phase in (goes_on, waits)] == [2, 1]


async def test_engines_without_rows_hold_nobody_up(make_run: MakeRun) -> None:
    pools = {**SHARED, "rollout_third": "d", "ref": "d"}
    run = make_run(OVERLAPPED, steps=1, pool_of=pools, shared=["rollout_shared", "rollout_third"])
    run.world.durations["generate"] /= 2

    await run()

    assert [suffix for suffix, *_ in run.world.written] == ["", "_shared"], "there are fewer rows than pools"
    assert run.world.overlap("ref 1", "generate_shared 1")


async def test_a_worker_that_changes_the_responses_sees_all_of_them_first(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=1, hooks=[HookPoint.GENERATE])

    await run()

    assert run.world.at("values 1", "start") >= run.world.at("hook_Generate 1", "end")


async def test_what_fails_on_a_part_ends_the_run_with_its_own_error(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=2)
    run.world.failing["ref"] = ZeroDivisionError("in the reference")

    with pytest.raises(ZeroDivisionError, match="in the reference"):
        await run()

    assert "advantages 1" not in run.world.names()


async def test_overlapped_pushes_the_weights_when_the_actor_is_done_and_generates_while_the_critic_updates(
    make_run: MakeRun,
) -> None:
    run = make_run(OVERLAPPED, steps=2)

    await run()

    world = run.world
    assert world.at("push 1", "start") == world.at("update_actor 1", "end")
    assert world.at("update_critic 1", "end") > world.at("push 1", "end")
    assert world.overlap("update_critic 1", "generate 2")


async def test_the_next_values_wait_for_the_critic_however_long_its_update_takes(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=2)
    run.world.durations["update_critic"] = 100.0

    await run()

    assert run.world.at("values 2", "start") >= run.world.at("update_critic 1", "end")
    assert run.world.at("old_log_prob 2", "start") < run.world.at("values 2", "start")


@pytest.mark.parametrize("mode", [SERIAL, OVERLAPPED])
async def test_without_critic_and_reference_the_actors_group_computes_advantages(
    make_run: MakeRun, mode: ScheduleMode
) -> None:
    run = make_run(mode, steps=2, has_critic=False, has_ref=False)

    outcome = await run()

    assert outcome.is_finished
    assert not {"values 1", "ref 1", "update_critic 1"} & set(run.world.names())


async def test_the_warmup_of_the_critic_leaves_the_actor_alone(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=2, settings={"critic_warmup_steps": 1})

    await run()

    assert not {"update_actor 1", "push 1"} & set(run.world.names())
    assert {"update_critic 1", "update_actor 2", "push 2"} <= set(run.world.names())


async def test_engines_that_sleep_get_their_weights_back_in_the_warmup_too(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=3, settings={"critic_warmup_steps": 2})
    run.world.engines_sleep = True

    await run()

    names = run.world.names()
    assert [name for name in names if name.startswith("update_actor")] == ["update_actor 3"]
    assert [name for name in names if name.startswith("push")] == ["push 1", "push 2", "push 3"]


async def test_a_failing_phase_ends_the_run_with_its_own_error(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=2)
    run.world.failing["values"] = ZeroDivisionError("in the critic")

    with pytest.raises(ZeroDivisionError, match="in the critic"):
        await run()

    assert "advantages 1" not in run.world.names()


async def test_a_critic_update_that_fails_ends_the_run_before_the_next_values(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=3)
    run.world.failing["update_critic"] = ZeroDivisionError("in the update")

    with pytest.raises(ZeroDivisionError, match="in the update"):
        await run()

    assert "values 2" not in run.world.names()


async def test_without_values_they_wait_for_old_log_prob_and_ref_does_not(make_run: MakeRun) -> None:
    run = make_run(schedule_of(OVERLAPPED, [Overlap.VALUES, Overlap.STREAMING]), steps=1)

    await run()

    world = run.world
    assert world.at("values 1", "start") >= world.at("old_log_prob 1", "end")
    assert world.at("ref 1", "start") == world.at("generate 1", "end")


async def test_without_reference_it_waits_for_old_log_prob_and_values_do_not(make_run: MakeRun) -> None:
    run = make_run(schedule_of(OVERLAPPED, [Overlap.REFERENCE, Overlap.STREAMING]), steps=1)

    await run()

    world = run.world
    assert world.at("ref 1", "start") >= world.at("old_log_prob 1", "end")
    assert world.overlap("values 1", "old_log_prob 1")


async def test_without_weight_sync_the_weights_wait_for_the_critic(make_run: MakeRun) -> None:
    run = make_run(schedule_of(OVERLAPPED, [Overlap.WEIGHT_SYNC]), steps=2)

    await run()

    world = run.world
    assert world.overlap("update_actor 1", "update_critic 1")
    assert world.at("push 1", "start") >= world.at("update_critic 1", "end")


async def test_without_next_generation_only_the_weights_go_ahead_of_the_critic(make_run: MakeRun) -> None:
    run = make_run(schedule_of(OVERLAPPED, [Overlap.NEXT_GENERATION]), steps=2)

    await run()

    world = run.world
    assert world.at("push 1", "start") < world.at("update_critic 1", "end")
    assert world.at("generate 2", "start") >= world.at("update_critic 1", "end")


@pytest.mark.parametrize(
    ("mode", "without", "settings", "is_computed"),
    [
        (OVERLAPPED, [], {"is_one_update": True}, False),
        (OVERLAPPED, [Overlap.OLD_LOG_PROB], {"is_one_update": True}, True),
        (OVERLAPPED, [], {}, True),
        (PARALLEL, [], {"is_one_update": True}, True),
        (SERIAL, [], {"is_one_update": True}, True),
        (OVERLAPPED, [Overlap.OLD_LOG_PROB], {"is_bypassed": True}, False),
        (SERIAL, [], {"is_bypassed": True}, False),
    ],
)
async def test_old_log_prob_is_left_out_where_the_ratio_is_one_or_the_engines(
    make_run: MakeRun, mode: ScheduleMode, without: list[Overlap], settings: dict[str, bool], is_computed: bool
) -> None:
    run = make_run(schedule_of(mode, without), steps=1, settings=settings)

    await run()

    assert ("old_log_prob 1" in run.world.names()) == is_computed


async def test_what_the_weights_moved_is_in_the_record_of_the_step(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=2)

    await run()

    assert {record.get("comm_mb/update_weights") for step, record in run.monitor.records.items() if step} == {269.0}
