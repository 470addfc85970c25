"""A reference in several pools: a pool that is free earlier computes more rows; the cost model agrees."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.training import Overlap, ScheduleMode
from ppojob_trainer.controller.forward import ChainPhases, ForwardPhase, StreamedPhases, at_once, no_metrics
from ppojob_trainer.controller.schedule import Schedule, schedule_of
from ppojob_trainer.controller.shared_rows import Helper
from ppojob_trainer.controller.step_time import Layout, step_time
from tests.unit.trainer.controller.conftest import MakeRun, Run
from tests.unit.trainer.controller.fake_world import FakeBatch
from tests.unit.trainer.controller.test_pools_take_turns import MODES, ROLES, numbers, overlaps, placements, varied
from tests.unit.trainer.controller.test_step_time import NAMES

SERIAL, PARALLEL, OVERLAPPED = ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED
WHOLE = schedule_of(OVERLAPPED, [Overlap.STREAMING])
COPY = "ref_copy"
BOTH = {"data": "a", "actor": "a", "rollout": "a", "critic": "c", "ref": "c", COPY: "a", "reward": "c"}
NUM_ROWS = 64


def spans(run: Run, name: str) -> list[tuple[float, float]]:
    """Return start and end of each part of a phase, in seconds after the end of the first generation."""
    zero = run.world.at("generate 1", "end")
    starts, ends = ([at - zero for at, what, found in run.world.events if (what, found) == (name, edge)]
                    for edge in ("start", "end"))  # fmt: skip
    return [(round(start, 9), round(end, 9)) for start, end in zip(starts, ends, strict=True)]


def with_ref(make_run: MakeRun, schedule: Any, seconds: float, **options: Any) -> Run:
    """Return a run whose reference needs so many seconds for the whole batch in either pool."""
    run = make_run(schedule, **{"steps": 1, "pool_of": BOTH, "num_rows": NUM_ROWS, "ref_copies": [COPY], **options})
    run.world.durations.update({"ref": seconds, COPY: seconds})
    return run


async def test_each_pool_takes_a_share_of_the_rows_when_it_has_nothing_else_to_compute(make_run: MakeRun) -> None:
    run = with_ref(make_run, WHOLE, 8.0)

    await run()

    # The values end after 2 s, the old log-probs after 3 s. An eighth of the rows is the smallest part.
    assert spans(run, "ref 1") == [(2.0, 6.0), (6.0, 7.0)]
    assert spans(run, f"{COPY} 1") == [(3.0, 5.0), (5.0, 6.0)]
    assert spans(run, "advantages 1")[0][0] == 7.0


async def test_without_old_log_probs_the_actors_pool_computes_most(make_run: MakeRun) -> None:
    run = with_ref(make_run, WHOLE, 2.0, settings={"is_one_update": True})

    await run()

    assert spans(run, f"{COPY} 1") == [(0.0, 1.0), (1.0, 1.5), (1.5, 1.75), (1.75, 2.0)]
    assert spans(run, "ref 1") == []
    assert spans(run, "advantages 1")[0][0] == 2.5, "the reward function ends last"


@pytest.mark.parametrize("mode", [SERIAL, PARALLEL])
async def test_in_the_other_modes_all_pools_compute_at_the_same_time(make_run: MakeRun, mode: ScheduleMode) -> None:
    run = with_ref(make_run, mode, 8.0)

    await run()

    # After the reward, the old log-probs and the values; in half of the time.
    assert spans(run, "ref 1")[0][0] == spans(run, f"{COPY} 1")[0][0] == 7.5
    assert spans(run, "advantages 1")[0][0] == 11.5
    assert sum(end - start for name in ("ref 1", f"{COPY} 1") for start, end in spans(run, name)) == 8.0


async def test_a_pool_with_more_gpus_takes_more_rows(make_run: MakeRun) -> None:
    run = with_ref(make_run, SERIAL, 8.0, settings={"gpus": {"a": 3, "c": 1}})

    await run()

    # The first takes a quarter, the other three quarters of what is left: 16 and 36 rows of 64, at 8 s for all.
    assert spans(run, "ref 1")[0] == (7.5, 9.5)
    assert spans(run, f"{COPY} 1")[0] == (7.5, 12.0)


async def test_a_pool_that_generates_helps_when_it_has_ended(make_run: MakeRun) -> None:
    run = with_ref(make_run, OVERLAPPED, 16.0, settings={"is_one_update": True}, num_rows=2)

    await run()

    assert spans(run, "ref 1")[0][0] < 0, "on the responses that were finished first"
    assert spans(run, f"{COPY} 1")[0][0] == 0.0
    assert min(start for start, _ in spans(run, f"{COPY} 1")) >= 0


async def test_a_busy_pool_holds_nobody_up(make_run: MakeRun) -> None:
    """The rollout's pool generates for a later step when this one begins, and the other pool computes all rows."""
    pools = {**BOTH, "rollout": "r", COPY: "r", "ref": "a"}
    run = with_ref(make_run, ScheduleMode.ONE_STEP_OFF, 8.0, steps=4, pool_of=pools)
    run.world.durations["generate"] = 100.0

    await run()

    done = max(at for at, what, edge in run.world.events if (what, edge) == ("ref 2", "end"))
    assert run.world.at("advantages 2", "start") == pytest.approx(done)
    assert run.world.overlap("generate 3", "advantages 2")


@pytest.mark.parametrize("num_rows", [2, 5])
@pytest.mark.parametrize(("mode", "without"), MODES)
async def test_no_pool_does_two_phases_at_once_and_all_numbers_agree(
    make_run: MakeRun, mode: ScheduleMode, without: list[Overlap], num_rows: int
) -> None:
    def make(schedule: Schedule, pool_of: Mapping[str, str], copies: Sequence[str] = ()) -> Run:
        run = make_run(
            schedule,
            steps=3,
            validate_every=2,
            save_every=2,
            pool_of={"data": "pool-0", "reward": "pool-0", **pool_of},
            reward="Both",
            num_rows=num_rows,
            ref_copies=copies,
        )
        run.world.engines_sleep = True
        return run

    serial = make(schedule_of(SERIAL), dict.fromkeys(ROLES, "pool-0"))
    await serial()
    for number, placed in enumerate(placements()):
        others = sorted({"pool-0", "pool-1", "pool-2"} - {placed["ref"]})
        if mode is PARALLEL and placed["actor"] == placed["critic"]:
            continue
        pool_of = {**placed, COPY: others[number % 2]}
        run = make(schedule_of(mode, without), pool_of, [COPY])
        run.world.durations.update(varied(number))

        assert (await run()).is_finished

        assert overlaps(run.world, pool_of) == [], f"{pool_of}"
        assert numbers(run) == numbers(serial), f"{pool_of}"
        assert {"ref 1", f"{COPY} 1"} & set(run.world.names())


@pytest.mark.parametrize("seconds", [0.53, 1.07, 4.1, 15.9])
@pytest.mark.parametrize(
    ("mode", "without"),
    [*((mode, []) for mode in (SERIAL, PARALLEL, OVERLAPPED)), *((OVERLAPPED, [overlap]) for overlap in Overlap)],
)
@pytest.mark.parametrize(
    ("changes", "ports"),
    [
        ({}, {}),
        ({"rollout": "r"}, {}),
        ({"rollout": "r", COPY: "r"}, {}),
        ({COPY: "f"}, {}),
        ({"ref": "f"}, {}),
        ({"critic": "a"}, {}),
        ({"reward_model": "c"}, {"reward": "Both"}),
        ({"reward_model": "a"}, {"reward": "Both"}),
        ({"critic": "a", "rollout": "r"}, {"has_critic": False}),
        ({"rollout_shared": "c"}, {"shared": ["rollout_shared"]}),
    ],
)
async def test_the_cost_model_takes_as_long(
    make_run: MakeRun,
    changes: dict[str, str],
    ports: dict[str, Any],
    mode: ScheduleMode,
    without: list[Overlap],
    seconds: float,
) -> None:
    schedule, pool_of = schedule_of(mode, [*without, Overlap.STREAMING]), {**BOTH, **changes}
    run = with_ref(make_run, schedule, seconds, steps=6, pool_of=pool_of, **ports)
    await run()
    left_out = {"values", "update_critic"} if ports.get("has_critic") is False else set()
    taken = {phase: run.world.durations[name] for phase, name in NAMES.items() if phase not in left_out}
    if "reward" in ports:
        taken["reward_model"] = run.world.durations["reward_model"]
    # Both pools together need half of the time.
    taken["ref"] /= 2

    found = step_time(taken, layout_of(schedule, pool_of, ports))

    measured = [run.monitor.records[step]["timing_s/step"] for step in range(3, 6)]
    assert measured == pytest.approx([found.seconds] * 3)
    for pool, busy in found.busy.items():
        assert run.monitor.records[4][f"pool/{pool}/busy_fraction"] == pytest.approx(busy, abs=0.02)


@pytest.mark.parametrize("slow", [{}, {"generate": 30.0}, {"update_actor": 20.0}, {"update_critic": 20.0}])
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"ref": "f"}, {COPY: "f"}])
async def test_one_step_off_takes_as_long_as_the_cost_model_says(
    make_run: MakeRun, changes: dict[str, str], most: int, slow: dict[str, float]
) -> None:
    schedule = replace(schedule_of(ScheduleMode.ONE_STEP_OFF), max_staleness=most)
    pool_of = {**BOTH, "rollout": "r", **changes}
    run = with_ref(make_run, schedule, 8.0, steps=24, pool_of=pool_of)
    run.world.are_lengths_equal = True
    run.world.durations.update(slow)
    await run()
    taken = {phase: run.world.durations[name] for phase, name in NAMES.items()}
    taken["ref"] /= 2

    found = step_time(taken, layout_of(schedule, pool_of, {}))

    period = 2 * most
    measured = [run.monitor.records[step]["timing_s/step"] for step in range(9, 9 + period)]
    assert sum(measured) / period == pytest.approx(found.seconds)


def layout_of(schedule: Schedule, pool_of: Mapping[str, str], ports: Mapping[str, Any]) -> Layout:
    on_gpus = {role: pool for role, pool in pool_of.items() if role not in ("data", "reward", COPY)}
    on_gpus = {role: pool for role, pool in on_gpus.items() if role != "critic" or ports.get("has_critic", True)}
    return Layout(
        on_gpus,
        dict.fromkeys(pool_of.values(), 1),
        schedule,
        shared=[pool_of[role] for role in ports.get("shared", ())],
        ref_pools=[pool_of["ref"], pool_of[COPY]],
    )


async def test_rows_that_were_lost_are_computed_again_by_whichever_pool_is_free() -> None:
    gate, seen = asyncio.Event(), list[tuple[str, tuple[tuple[int, int], ...]]]()

    def helper(role: str) -> Helper[FakeBatch]:
        async def compute(batch: FakeBatch) -> FakeBatch:
            seen.append((role, batch.rows))
            await gate.wait()
            return FakeBatch(len(batch), {"ref": 1.0}, batch.rows)

        async def in_turn(work: Any) -> Any:
            return await work

        return Helper(in_turn, compute, 1)

    phase = ForwardPhase.of({role: helper(role) for role in ("ref", COPY)}, no_metrics, at_once)
    streamed = StreamedPhases({"ref": phase}, 4)
    for role in ("ref", COPY):
        streamed.follow(ChainPhases([], {"ref": role}))
    streamed.add([0, 1, 2], FakeBatch(3, {}, ((0, 0), (1, 0), (2, 0))))
    for _ in range(10):
        await asyncio.sleep(0)
    assert seen == [("ref", ((0, 0), (1, 0))), (COPY, ((2, 0),))]

    streamed.drop([1, 2])
    streamed.add([3, 2, 1], FakeBatch(3, {}, ((3, 0), (2, 1), (1, 1))))
    streamed.end()
    gate.set()
    found = await streamed.found()

    assert found["ref"].rows == ((0, 0), (1, 1), (2, 1), (3, 0))
