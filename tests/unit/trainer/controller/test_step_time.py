"""The step's time from its phases': as it was measured, and as the real controller runs them in virtual time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.training import Overlap, ScheduleMode
from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.phases import Phase
from ppojob_trainer.controller.schedule import schedule_of
from ppojob_trainer.controller.step_time import Layout, role_of, step_time
from tests.unit.trainer.controller.conftest import MakeRun
from tests.unit.trainer.controller.fake_world import DURATIONS

SERIAL, PARALLEL, OVERLAPPED = ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED
SPLIT = {"actor": "actor", "rollout": "actor", "critic": "critic", "ref": "critic"}
# Workload W at 0.5B, one H200 for each pool, Overlapped, compiled: medians. The step was 6.86 s, pool actor 92 % busy,
# pool critic 49 %.
MEASURED = {
    "gen": 3.19,
    "old_log_prob": 1.03,
    "values": 0.65,
    "ref": 0.83,
    "update_critic": 1.97,
    "update_actor": 2.12,
    "update_weights": 0.09,
}


def layout(mode: ScheduleMode, pool_of: Mapping[str, str] = SPLIT, without: Sequence[Overlap] = ()) -> Layout:
    return Layout(pool_of, dict.fromkeys(pool_of.values(), 1), schedule_of(mode, without))


def test_a_measured_step_comes_out_within_two_percent() -> None:
    found = step_time(MEASURED, layout(OVERLAPPED))

    assert found.seconds == pytest.approx(6.86, rel=0.02)
    assert found.busy["actor"] == pytest.approx(0.92, abs=0.02)
    assert found.busy["critic"] == pytest.approx(0.49, abs=0.02)


@pytest.mark.parametrize(
    ("mode", "without", "seconds"),
    [
        (SERIAL, [], sum(MEASURED.values())),
        (PARALLEL, [], sum(MEASURED.values()) - 1.97),
        # The critic's pool has the longer way to the advantages; the actor's update outlasts the critic's.
        (OVERLAPPED, [], 3.19 + 0.65 + 0.83 + 2.12 + 0.09),
        (OVERLAPPED, [Overlap.VALUES], 3.19 + 1.03 + 0.65 + 2.12 + 0.09),
        (OVERLAPPED, [Overlap.REFERENCE], 3.19 + 1.03 + 0.83 + 2.12 + 0.09),
        (OVERLAPPED, [Overlap.NEXT_GENERATION], 3.19 + 0.65 + 0.83 + 2.12 + 0.09),
    ],
)
def test_the_measured_phases_in_every_mode(mode: ScheduleMode, without: list[Overlap], seconds: float) -> None:
    assert step_time(MEASURED, layout(mode, without=without)).seconds == pytest.approx(seconds)


def test_a_critic_that_is_busy_into_the_next_step_holds_the_values_up() -> None:
    phases = {**MEASURED, "update_critic": 8.0}

    found = step_time(phases, layout(OVERLAPPED))

    # The critic's pool is never idle: values, ref, update, and again.
    assert found.seconds == pytest.approx(8.0 + 0.65 + 0.83)
    assert found.busy["critic"] == pytest.approx(1.0)


def test_a_reference_in_a_separate_pool_waits_for_nobody() -> None:
    phases = {**MEASURED, "update_critic": 8.0}

    found = step_time(phases, layout(OVERLAPPED, {**SPLIT, "ref": "third"}))

    assert found.seconds == pytest.approx(8.0 + 0.65)


def test_without_a_critic_the_advantages_are_the_actors() -> None:
    assert [role_of(Phase.ADVANTAGES, roles) for roles in (SPLIT, {"actor": "a"})] == ["critic", "actor"]


NAMES = {
    "data": "prompts", "gen": "generate", "old_log_prob": "old_log_prob", "values": "values", "ref": "ref",
    "reward": "reward", "adv": "advantages", "update_actor": "update_actor", "update_critic": "update_critic",
    "update_weights": "push",
}  # fmt: skip
"""Phase -> its duration among those of the fake ports."""
POOLS = {"actor": "a", "rollout": "a", "critic": "c", "ref": "c", "reward_model": "c"}


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("mode", [SERIAL, PARALLEL, OVERLAPPED])
@pytest.mark.parametrize(
    ("pool_of", "ports", "without"),
    [
        (POOLS, {}, []),
        (POOLS, {"has_ref": False}, []),
        (dict.fromkeys(POOLS, "a"), {}, []),
        (dict.fromkeys(POOLS, "a"), {"has_critic": False}, []),
        ({"actor": "a", "rollout": "r", "ref": "a"}, {"has_critic": False}, []),
        ({"actor": "a", "rollout": "r", "ref": "f"}, {"has_critic": False}, []),
        ({"actor": "a", "rollout": "a", "ref": "f", "reward_model": "f"}, {"has_critic": False, "reward": "Both"}, []),
        (POOLS, {"reward": "Both"}, []),
        ({**POOLS, "reward_model": "r"}, {"reward": "Both"}, []),
        ({**POOLS, "ref": "a"}, {}, []),
        ({**POOLS, "rollout": "r"}, {}, []),
        ({**POOLS, "rollout": "c"}, {}, []),
        ({**POOLS, "rollout": "c", "ref": "a"}, {"hooks": [HookPoint.STEP]}, []),
        (POOLS, {"hooks": [HookPoint.GENERATE]}, []),
        (POOLS, {"hooks": [HookPoint.SCORE]}, []),
        (POOLS, {"hooks": [HookPoint.STEP]}, []),
        ({**POOLS, "rollout_shared": "c"}, {"shared": ["rollout_shared"]}, []),
        ({**POOLS, "rollout": "r", "rollout_shared": "a"}, {"shared": ["rollout_shared"]}, []),
        (POOLS, {}, [Overlap.VALUES]),
        (POOLS, {"reward": "Both"}, [Overlap.VALUES]),
        (POOLS, {}, [Overlap.REFERENCE]),
        (POOLS, {}, [Overlap.WEIGHT_SYNC]),
        (POOLS, {}, [Overlap.NEXT_GENERATION]),
    ],
)
async def test_the_real_controller_takes_as_long(
    make_run: MakeRun,
    mode: ScheduleMode,
    pool_of: dict[str, str],
    ports: dict[str, Any],
    without: list[Overlap],
    sleeps: bool,
) -> None:
    schedule = schedule_of(mode, [*without, Overlap.STREAMING])
    run = make_run(schedule, steps=6, pool_of={"data": "a", "reward": "c", **pool_of}, **ports)
    run.world.engines_sleep = sleeps
    await run()
    seconds = {phase: DURATIONS[name] for phase, name in NAMES.items()}
    for role, phases in (("critic", ("values", "update_critic")), ("ref", ("ref",))):
        if ports.get(f"has_{role}") is False:
            seconds = {phase: taken for phase, taken in seconds.items() if phase not in phases}
    if "reward" in ports:
        seconds["reward_model"] = DURATIONS["reward_model"]
    hooks = {point: ("shaper",) for point in ports.get("hooks", ())}
    if hooks:
        seconds["hook_shaper"] = sum(DURATIONS[f"hook_{point.value}"] for point in hooks)

    gpus, shared = dict.fromkeys(pool_of.values(), 1), [pool_of[role] for role in ports.get("shared", ())]
    found = step_time(seconds, Layout(pool_of, gpus, schedule, hooks, shared=shared, engines_sleep=sleeps))

    # The first step has nobody before it, the last nobody after it.
    measured = [run.monitor.records[step]["timing_s/step"] for step in range(3, 6)]
    assert measured == pytest.approx([found.seconds] * 3)
    assert run.monitor.records[4]["pool/a/busy_fraction"] == pytest.approx(found.busy["a"], abs=0.02)


@pytest.mark.parametrize(
    ("update_critic", "taken_over"),
    [(8.0, False), (12.0, False), (30.0, True), (100.0, True)],
)
async def test_engines_that_are_done_take_over_what_a_late_pool_has_not_begun(
    make_run: MakeRun, update_critic: float, taken_over: bool
) -> None:
    schedule, shared = schedule_of(OVERLAPPED, [Overlap.STREAMING]), {**POOLS, "rollout_shared": "c"}
    run = make_run(schedule, steps=6, pool_of={"data": "a", "reward": "c", **shared}, shared=["rollout_shared"])
    run.world.durations["update_critic"] = update_critic
    await run()
    seconds = {phase: run.world.durations[name] for phase, name in NAMES.items()}

    found = step_time(seconds, Layout(shared, {"a": 1, "c": 1}, schedule, shared=["c"]))

    assert ("_shared" not in {suffix for suffix, _, step, _ in run.world.written if step == 4}) is taken_over
    measured = [run.monitor.records[step]["timing_s/step"] for step in range(3, 6)]
    assert measured == pytest.approx([found.seconds] * 3)


SLOW = [{}, {"generate": 30.0}, {"update_actor": 20.0}, {"prompts": 6.0, "push": 4.0}, {"generate": 21.0, "push": 6.0}]
SLOW += [{"reward": 9.0}, {"ref": 9.0}, {"reward": 30.0, "update_actor": 8.0}]


@pytest.mark.parametrize(
    ("most", "in_flight"), [*((most, False) for most in range(5)), (1, True), (2, True), (4, True)]
)
@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize(
    ("pool_of", "ports"),
    [
        ({**POOLS, "rollout": "r"}, {}),
        ({**POOLS, "rollout": "r", "critic": "a"}, {}),
        ({"actor": "a", "rollout": "r", "ref": "a"}, {"has_critic": False}),
        ({"actor": "a", "rollout": "r", "ref": "f"}, {"has_critic": False}),
        (
            {"actor": "a", "rollout": "r", "ref": "a", "rollout_shared": "s"},
            {"has_critic": False, "shared": ["rollout_shared"]},
        ),
    ],
)
async def test_one_step_off_takes_as_long_as_the_real_controller(
    make_run: MakeRun,
    pool_of: dict[str, str],
    ports: dict[str, Any],
    slow: dict[str, float],
    most: int,
    in_flight: bool,
) -> None:
    stale = schedule_of(ScheduleMode.ONE_STEP_OFF)
    # On-policy, the result leaves out what streaming saves.
    schedule = replace(stale, max_staleness=most, in_flight=in_flight, streaming=most > 0)
    run = make_run(schedule, steps=24, pool_of={"data": "a", "reward": "c", **pool_of}, **ports)
    run.world.are_lengths_equal = True
    run.world.durations.update(slow)
    if "rollout_shared" in pool_of:
        run.world.durations["generate_shared"] = run.world.durations["generate"]
    await run()
    left_out = {"values", "update_critic"} if ports else set()
    seconds = {phase: run.world.durations[name] for phase, name in NAMES.items() if phase not in left_out}
    gpus, shared = dict.fromkeys(pool_of.values(), 1), [pool_of[role] for role in ports.get("shared", ())]

    found = step_time(seconds, Layout(pool_of, gpus, schedule, shared=shared))

    # The last steps generate nothing. Between a push and the next that waits for its generation, steps may differ.
    period = (most + 1 if in_flight else 2 * most) or 1
    measured = [run.monitor.records[step]["timing_s/step"] for step in range(9, 9 + period)]
    assert sum(measured) / period == pytest.approx(found.seconds)


async def test_streaming_makes_a_step_shorter_than_that(make_run: MakeRun) -> None:
    run = make_run(OVERLAPPED, steps=6, pool_of={"data": "a", "reward": "c", **POOLS})
    await run()
    seconds = {phase: DURATIONS[name] for phase, name in NAMES.items()}

    found = step_time(seconds, Layout(POOLS, {"a": 1, "c": 1}, schedule_of(OVERLAPPED)))

    assert run.monitor.records[4]["timing_s/step"] <= found.seconds
