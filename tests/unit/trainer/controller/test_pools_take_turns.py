"""A pool computes one phase at a time, and the numbers stay those of Serial: in every placement, mode and overlap."""

import random
from collections.abc import Iterator, Mapping, Sequence

import pytest

from ppojob_api.v1alpha1.training import Overlap, ScheduleMode
from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.schedule import Schedule, schedule_of
from tests.unit.trainer.controller.conftest import MakeRun, Run, StopAt
from tests.unit.trainer.controller.fake_world import DURATIONS, World

SERIAL, PARALLEL, OVERLAPPED = ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED
MODES: list[tuple[ScheduleMode, list[Overlap]]] = [
    (SERIAL, []),
    (PARALLEL, []),
    (OVERLAPPED, []),
    *((OVERLAPPED, [overlap]) for overlap in Overlap),
]
ROLES = ("actor", "rollout", "critic", "ref", "reward_model")
ROLE_OF = {
    "generate": "rollout",
    "validate": "rollout",
    "generate_shared": "rollout_shared",
    "validate_shared": "rollout_shared",
    "push": "rollout",
    "old_log_prob": "actor",
    "update_actor": "actor",
    "values": "critic",
    "advantages": "critic",
    "update_critic": "critic",
    "ref": "ref",
    "ref_copy": "ref_copy",
    "reward_model": "reward_model",
    "reward_model_copy": "reward_model_copy",
    "judge": "reward_model",
    "judge_copy": "reward_model_copy",
    "hook_Score": "shaper",
    "hook_Step": "shaper",
}
TIMES = ("timing", "perf/throughput", "perf/time_per_step", "pool/", "overlap/", "rollout/engines")


def placements(roles: Sequence[str] = ROLES, used: int = 0) -> Iterator[dict[str, str]]:
    """Yield every way to put the roles into up to three pools; which is called what makes no difference."""
    if not roles:
        yield {}
        return
    for pool in range(min(used + 1, 3)):
        for others in placements(roles[1:], max(used, pool + 1)):
            yield {roles[0]: f"pool-{pool}", **others}


def varied(seed: int) -> dict[str, float]:
    """Return durations that differ by as much as a factor of 100."""
    generator = random.Random(seed)
    return {name: 10 ** generator.uniform(-1, 1) for name in DURATIONS}


def overlaps(world: World, pool_of: Mapping[str, str]) -> list[str]:
    """Return which phases began in a pool that was not free."""
    running: dict[str, str] = {}
    found = []
    for time, name, edge in world.events:
        role = ROLE_OF.get(name.split()[0])
        if role is None or role not in pool_of:
            continue
        pool = pool_of[role]
        if edge == "end":
            del running[pool]
        elif pool in running:
            found.append(f"{name} at {time:.1f} beside {running[pool]} in {pool}")
        else:
            running[pool] = name
    return found


def numbers(run: Run) -> object:
    records = {
        step: {name: value for name, value in record.items() if not name.startswith(TIMES)}
        for step, record in run.monitor.records.items()
    }
    return records, run.world.actor, run.world.critic, run.checkpoints.saved


@pytest.mark.parametrize("has_worker", [False, True])
@pytest.mark.parametrize(("mode", "without"), MODES)
async def test_no_pool_does_two_phases_at_once_and_all_numbers_agree(
    make_run: MakeRun, mode: ScheduleMode, without: list[Overlap], has_worker: bool
) -> None:
    def make(schedule: Schedule, pool_of: Mapping[str, str]) -> Run:
        run = make_run(
            schedule,
            steps=3,
            validate_every=2,
            save_every=2,
            pool_of={"data": "pool-0", "reward": "pool-0", **pool_of},
            settings={"critic_warmup_steps": 1},
            reward="Both",
            hooks=(HookPoint.SCORE, HookPoint.STEP) if has_worker else (),
        )
        run.world.engines_sleep = True
        return run

    serial = make(schedule_of(SERIAL), dict.fromkeys(ROLES, "pool-0"))
    await serial()
    for number, placed in enumerate(placements()):
        if mode is PARALLEL and placed["actor"] == placed["critic"]:
            # The rules of the spec refuse it.
            continue
        pool_of = placed | ({"shaper": f"pool-{number % 3}"} if has_worker else {})
        run = make(schedule_of(mode, without), pool_of)
        run.world.durations.update(varied(number))

        assert (await run()).is_finished

        assert overlaps(run.world, pool_of) == [], f"{pool_of}"
        assert numbers(run) == numbers(serial), f"{pool_of}"


@pytest.mark.parametrize("has_ref", [False, True])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(("mode", "without"), [each for each in MODES if each[0] is not PARALLEL])
async def test_without_a_critic_too(
    make_run: MakeRun, mode: ScheduleMode, without: list[Overlap], shares: bool, has_ref: bool
) -> None:
    roles = [role for role in ROLES if role != "critic" and (has_ref or role != "ref")]

    def make(schedule: Schedule, pool_of: Mapping[str, str], shared: Sequence[str] = ()) -> Run:
        pool_of = {"data": "pool-0", "reward": "pool-0", **pool_of}
        ports = {"has_critic": False, "has_ref": has_ref, "reward": "Both", "shared": shared}
        run = make_run(schedule, steps=3, validate_every=2, save_every=2, pool_of=pool_of, **ports)
        run.world.engines_sleep = True
        return run

    serial = make(schedule_of(SERIAL), dict.fromkeys(roles, "pool-0"))
    await serial()
    for number, placed in enumerate(placements(roles)):
        others = sorted(set(placed.values()) - {placed["rollout"]}) if shares else []
        if shares and not others:
            continue
        pool_of = placed | ({"rollout_shared": others[number % len(others)]} if others else {})
        run = make(schedule_of(mode, without), pool_of, ["rollout_shared"] if others else [])
        run.world.durations.update(varied(number))

        assert (await run()).is_finished

        assert overlaps(run.world, pool_of) == [], f"{pool_of}"
        assert numbers(run) == numbers(serial), f"{pool_of}"


async def test_without_a_critic_the_log_probs_run_while_another_pool_generates(make_run: MakeRun) -> None:
    pools = {"data": "a", "actor": "a", "rollout": "r", "ref": "a", "reward": "a"}
    run = make_run(OVERLAPPED, steps=2, pool_of=pools, has_critic=False)

    await run()

    world = run.world
    assert world.overlap("generate 1", "old_log_prob 1")
    assert world.overlap("generate 1", "ref 1")
    assert world.overlap("generate 1", "reward 1")


async def test_in_one_pool_the_reward_function_runs_beside_the_log_probs(make_run: MakeRun) -> None:
    schedule = schedule_of(OVERLAPPED, [Overlap.NEXT_GENERATION, Overlap.STREAMING])
    run = make_run(schedule, steps=2, pool_of=dict.fromkeys(("data", *ROLES, "reward"), "a"), has_critic=False)

    await run()

    assert run.world.overlap("reward 1", "old_log_prob 1")
    assert run.world.at("reward 1", "start") == run.world.at("generate 1", "end")


async def test_the_engines_in_the_critics_pool_get_their_weights_when_its_update_is_done(make_run: MakeRun) -> None:
    pools = {"data": "a", "actor": "a", "rollout": "c", "critic": "c", "ref": "c", "reward": "c"}
    run = make_run(OVERLAPPED, steps=2, pool_of=pools)
    run.world.durations["update_critic"] = 100.0

    await run()

    world = run.world
    assert world.overlap("update_actor 1", "update_critic 1"), "they are in two pools"
    assert world.at("push 1", "start") == world.at("update_critic 1", "end")
    assert world.at("generate 2", "start") > world.at("push 1", "end")


async def test_engines_that_are_filled_in_the_warmup_wait_for_the_critic_in_their_pool(make_run: MakeRun) -> None:
    pools = {"data": "a", "actor": "a", "rollout": "c", "critic": "c", "ref": "c", "reward": "c"}
    run = make_run(OVERLAPPED, steps=2, pool_of=pools, settings={"critic_warmup_steps": 2})
    run.world.engines_sleep = True

    await run()

    world = run.world
    assert world.at("push 1", "start") == world.at("update_critic 1", "end")
    assert world.at("generate 2", "start") > world.at("push 1", "end")


async def test_a_reference_alone_in_the_critics_chain_waits_for_its_update(make_run: MakeRun) -> None:
    run = make_run(schedule_of(OVERLAPPED, [Overlap.VALUES]), steps=2)
    run.world.durations["update_critic"] = 30.0

    await run()

    assert run.world.at("ref 2", "start") >= run.world.at("update_critic 1", "end")
    assert run.world.at("old_log_prob 2", "start") < run.world.at("ref 2", "start")


async def test_a_stop_drops_what_waits_for_its_turn(make_run: MakeRun, stop_at: StopAt) -> None:
    run = make_run(schedule_of(OVERLAPPED, [Overlap.VALUES]), steps=3)
    run.world.durations["update_critic"] = 100.0

    outcome = await stop_at(run, "old_log_prob 2")

    assert (outcome.step, outcome.is_finished) == (1, False)
    assert "ref 2" not in run.world.names()


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize(("mode", "without"), MODES)
async def test_engines_in_a_pool_that_is_shared_take_turns_with_its_roles_and_change_no_number(
    make_run: MakeRun, mode: ScheduleMode, without: list[Overlap], sleeps: bool
) -> None:
    def make(schedule: Schedule, pool_of: Mapping[str, str], shared: Sequence[str] = ()) -> Run:
        pool_of = {"data": "pool-0", "reward": "pool-0", **pool_of}
        run = make_run(schedule, steps=3, validate_every=2, save_every=2, pool_of=pool_of, reward="Both", shared=shared)
        run.world.engines_sleep = sleeps
        return run

    serial = make(schedule_of(SERIAL), dict.fromkeys(ROLES, "pool-0"))
    await serial()
    for number, placed in enumerate(placements()):
        others = sorted(set(placed.values()) - {placed["rollout"]})
        if not others or (mode is PARALLEL and placed["actor"] == placed["critic"]):
            continue
        pool_of = {**placed, "rollout_shared": others[number % len(others)]}
        run = make(schedule_of(mode, without), pool_of, shared=["rollout_shared"])
        run.world.durations.update(varied(number))

        assert (await run()).is_finished

        assert overlaps(run.world, pool_of) == [], f"{pool_of}"
        assert numbers(run) == numbers(serial), f"{pool_of}"


@pytest.mark.parametrize("sleeps", [False, True])
async def test_engines_that_are_shared_write_when_the_critic_is_done_and_take_memory_no_earlier(
    make_run: MakeRun, sleeps: bool
) -> None:
    pools = {"data": "a", "actor": "a", "rollout": "a", "critic": "c", "ref": "c", "reward": "c", "rollout_shared": "c"}
    run = make_run(OVERLAPPED, steps=2, pool_of=pools, shared=["rollout_shared"])
    run.world.engines_sleep = sleeps
    run.world.durations["update_critic"] = 12.0

    await run()

    world = run.world
    done = world.at("update_critic 1", "end")
    assert world.at("generate_shared 2", "start") >= done
    assert world.at("values 2", "start") >= world.at("generate_shared 2", "end")
    assert (world.at("push 1", "start") >= done) is sleeps
    assert (world.at("generate 2", "start") >= done) is sleeps
    assert world.overlap("generate 1", "generate_shared 1")
