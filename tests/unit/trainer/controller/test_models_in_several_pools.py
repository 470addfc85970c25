"""Reference or reward model in several pools: a pool that is free earlier computes more; the cost model agrees."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.training import Overlap, ScheduleMode
from ppojob_trainer.controller.dynamic_sampling import SamplingSettings
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
NUM_ROWS = 64
POOLS = {"data": "a", "actor": "a", "rollout": "a", "critic": "c", "reward": "c"}


@dataclass(frozen=True)
class Model:
    """A model with a copy in a second pool. ports: of a run that has it, and not the other model."""

    name: str
    ports: Mapping[str, Any]

    @property
    def copy(self) -> str:
        return f"{self.name}_copy"

    def pools(self, own: str = "c", copy: str = "a") -> dict[str, str]:
        """Return the pool of each role of a run; by default, the copy is in the actor's pool."""
        return {**POOLS, self.name: own, self.copy: copy}


REF = Model("ref", {"ref_copies": ["ref_copy"]})
REWARD_MODEL = Model("reward_model", {"has_ref": False, "reward": "Both", "reward_copies": ["reward_model_copy"]})
both_models = pytest.mark.parametrize("model", [REF, REWARD_MODEL], ids=lambda model: model.name)


def spans(run: Run, name: str) -> list[tuple[float, float]]:
    """Return start and end of each part of a phase, in seconds after the end of the first generation."""
    zero = run.world.at("generate 1", "end")
    starts, ends = ([at - zero for at, what, found in run.world.events if (what, found) == (name, edge)]
                    for edge in ("start", "end"))  # fmt: skip
    return [(round(start, 9), round(end, 9)) for start, end in zip(starts, ends, strict=True)]


def with_copies(make_run: MakeRun, model: Model, schedule: Any, seconds: float, **options: Any) -> Run:
    """Return a run in which either copy needs so many seconds for the whole batch."""
    run = make_run(schedule, **{"steps": 1, "pool_of": model.pools(), "num_rows": NUM_ROWS, **model.ports, **options})
    run.world.durations.update({model.name: seconds, model.copy: seconds})
    return run


@both_models
async def test_each_pool_takes_a_share_of_the_rows_when_it_has_nothing_else_to_compute(
    make_run: MakeRun, model: Model
) -> None:
    run = with_copies(make_run, model, WHOLE, 8.0)

    await run()

    # The values end after 2 s, the old log-probs after 3 s. An eighth of the rows is the smallest part.
    assert spans(run, f"{model.name} 1") == [(2.0, 6.0), (6.0, 7.0)]
    assert spans(run, f"{model.copy} 1") == [(3.0, 5.0), (5.0, 6.0)]
    assert spans(run, "advantages 1")[0][0] == 7.0


@both_models
async def test_without_old_log_probs_the_actors_pool_computes_most(make_run: MakeRun, model: Model) -> None:
    run = with_copies(make_run, model, WHOLE, 2.0, settings={"is_one_update": True})

    await run()

    assert spans(run, f"{model.copy} 1") == [(0.0, 1.0), (1.0, 1.5), (1.5, 1.75), (1.75, 2.0)]
    assert spans(run, f"{model.name} 1") == []
    assert spans(run, "advantages 1")[0][0] == 2.5, "the reward function ends last"


@both_models
@pytest.mark.parametrize("mode", [SERIAL, PARALLEL])
async def test_in_the_other_modes_all_pools_compute_at_the_same_time(
    make_run: MakeRun, mode: ScheduleMode, model: Model
) -> None:
    run = with_copies(make_run, model, mode, 8.0)

    await run()

    # After the reward, the old log-probs and the values; in half of the time.
    assert spans(run, f"{model.name} 1")[0][0] == spans(run, f"{model.copy} 1")[0][0] == 7.5
    assert spans(run, "advantages 1")[0][0] == 11.5
    assert sum(end - start for name in (f"{model.name} 1", f"{model.copy} 1") for start, end in spans(run, name)) == 8.0


@both_models
async def test_a_pool_with_more_gpus_takes_more_rows(make_run: MakeRun, model: Model) -> None:
    run = with_copies(make_run, model, SERIAL, 8.0, settings={"gpus": {"a": 3, "c": 1}})

    await run()

    # The first takes a quarter, the other three quarters of what is left: 16 and 36 rows of 64, at 8 s for all.
    assert spans(run, f"{model.name} 1")[0] == (7.5, 9.5)
    assert spans(run, f"{model.copy} 1")[0] == (7.5, 12.0)


@both_models
async def test_a_pool_that_generates_helps_when_it_has_ended(make_run: MakeRun, model: Model) -> None:
    run = with_copies(make_run, model, OVERLAPPED, 16.0, settings={"is_one_update": True}, num_rows=2)

    await run()

    assert spans(run, f"{model.name} 1")[0][0] < 0, "on the responses that were finished first"
    assert spans(run, f"{model.copy} 1")[0][0] == 0.0
    assert min(start for start, _ in spans(run, f"{model.copy} 1")) >= 0


@both_models
async def test_a_busy_pool_holds_nobody_up(make_run: MakeRun, model: Model) -> None:
    """The rollout's pool generates for a later step when this one begins, and the other pool computes all rows."""
    pools = {**model.pools("a", "r"), "rollout": "r"}
    run = with_copies(make_run, model, ScheduleMode.ONE_STEP_OFF, 8.0, steps=4, pool_of=pools)
    run.world.durations["generate"] = 100.0

    await run()

    done = max(at for at, what, edge in run.world.events if (what, edge) == (f"{model.name} 2", "end"))
    assert run.world.at("advantages 2", "start") == pytest.approx(done)
    assert run.world.overlap("generate 3", "advantages 2")


@pytest.mark.parametrize(("num_rows", "models"), [(2, [REF]), (5, [REWARD_MODEL]), (5, [REF, REWARD_MODEL])])
@pytest.mark.parametrize(("mode", "without"), MODES)
async def test_no_pool_does_two_phases_at_once_and_all_numbers_agree(
    make_run: MakeRun, mode: ScheduleMode, without: list[Overlap], num_rows: int, models: list[Model]
) -> None:
    def make(schedule: Schedule, pool_of: Mapping[str, str], **copies: Any) -> Run:
        run = make_run(
            schedule,
            steps=3,
            validate_every=2,
            save_every=2,
            pool_of={"data": "pool-0", "reward": "pool-0", **pool_of},
            reward="Both",
            num_rows=num_rows,
            **copies,
        )
        run.world.engines_sleep = True
        return run

    copies = {name: value for model in models for name, value in model.ports.items() if name.endswith("_copies")}
    serial = make(schedule_of(SERIAL), dict.fromkeys(ROLES, "pool-0"))
    await serial()
    for number, placed in enumerate(placements()):
        if mode is PARALLEL and placed["actor"] == placed["critic"]:
            continue
        pool_of = dict(placed)
        for model in models:
            others = sorted({"pool-0", "pool-1", "pool-2"} - {placed[model.name]})
            pool_of[model.copy] = others[number % 2]
        run = make(schedule_of(mode, without), pool_of, **copies)
        run.world.durations.update(varied(number))

        assert (await run()).is_finished

        assert overlaps(run.world, pool_of) == [], f"{pool_of}"
        assert numbers(run) == numbers(serial), f"{pool_of}"
        for model in models:
            assert {f"{model.name} 1", f"{model.copy} 1"} & set(run.world.names())


async def test_all_pools_of_a_reward_model_score_a_validation_at_the_same_time(make_run: MakeRun) -> None:
    run = with_copies(make_run, REWARD_MODEL, WHOLE, 8.0, validate_every=1)

    await run()

    assert run.world.overlap("judge", "judge_copy")
    # The responses take 4 s, and the scores of either pool 1 s.
    assert run.monitor.records[1]["timing_s/testing"] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("copies", "without", "is_streamed"),
    [([], [], False), (["reward_model_copy"], [], True), ([], [Overlap.VALUES], False)],
)
async def test_with_dynamic_sampling_a_pool_that_does_not_generate_scores_alone_meanwhile(
    make_run: MakeRun, copies: list[str], without: list[Overlap], is_streamed: bool
) -> None:
    pool_of = {**POOLS, "rollout": "r", "reward_model": "r", "reward_model_copy": "c", "ref": "a"}
    sampling = SamplingSettings(num_prompts=4, num_samples=2, max_batches=20)
    ports: dict[str, Any] = {"reward": "Model", "reward_copies": copies, "settings": {"sampling": sampling}}
    schedules = (schedule_of(OVERLAPPED, without), schedule_of(SERIAL))
    run, serial = (make_run(schedule, pool_of=pool_of, **ports) for schedule in schedules)

    await run()
    await serial()

    name = "reward_model_copy 1" if is_streamed else "reward_model 1"
    assert run.world.overlap("generate 1", name) is is_streamed
    assert run.world.at("advantages 1", "start") >= max(
        at for at, what, edge in run.world.events if what.startswith("reward_model") and what.endswith(" 1")
    )
    assert run.world.trained == serial.world.trained
    assert overlaps(run.world, pool_of) == []


@pytest.mark.parametrize("seconds", [0.53, 1.07, 4.1, 15.9])
@pytest.mark.parametrize(
    ("mode", "without"),
    [*((mode, []) for mode in (SERIAL, PARALLEL, OVERLAPPED)), *((OVERLAPPED, [overlap]) for overlap in Overlap)],
)
@pytest.mark.parametrize(
    ("pools", "changes", "ports"),
    [
        (("c", "a"), {}, {}),
        (("c", "a"), {"rollout": "r"}, {}),
        (("c", "r"), {"rollout": "r"}, {}),
        (("c", "f"), {}, {}),
        (("f", "a"), {}, {}),
        (("c", "a"), {"critic": "a"}, {}),
        (("c", "a"), {"critic": "a", "rollout": "r"}, {"has_critic": False}),
        (("c", "a"), {"rollout_shared": "c"}, {"shared": ["rollout_shared"]}),
    ],
)
@both_models
async def test_the_cost_model_takes_as_long(
    make_run: MakeRun,
    model: Model,
    pools: tuple[str, str],
    changes: dict[str, str],
    ports: dict[str, Any],
    mode: ScheduleMode,
    without: list[Overlap],
    seconds: float,
) -> None:
    schedule, pool_of = schedule_of(mode, [*without, Overlap.STREAMING]), {**model.pools(*pools), **changes}
    run = with_copies(make_run, model, schedule, seconds, steps=6, pool_of=pool_of, **ports)
    await assert_as_long_as_predicted(run, schedule, pool_of, {**model.ports, **ports})


@pytest.mark.parametrize("seconds", [0.53, 4.1])
@pytest.mark.parametrize(
    ("mode", "without"), [(SERIAL, []), *((OVERLAPPED, [overlap]) for overlap in (Overlap.VALUES, Overlap.REFERENCE)),
                          (OVERLAPPED, [])]
)  # fmt: skip
@pytest.mark.parametrize(
    "changes",
    [
        {"reward_model": "c"},
        {"reward_model": "a"},
        {"reward_model": "c", "reward_model_copy": "a"},
        {"reward_model": "a", "reward_model_copy": "f"},
        {"reward_model": "r", "reward_model_copy": "c", "rollout": "r"},
    ],
)
async def test_the_cost_model_takes_as_long_with_both_models(
    make_run: MakeRun, changes: dict[str, str], mode: ScheduleMode, without: list[Overlap], seconds: float
) -> None:
    copies = ["reward_model_copy"] * ("reward_model_copy" in changes)
    ports: dict[str, Any] = {**REF.ports, "reward": "Both", "reward_copies": copies}
    schedule, pool_of = schedule_of(mode, [*without, Overlap.STREAMING]), {**REF.pools(), **changes}
    run = with_copies(make_run, REF, schedule, seconds, steps=6, pool_of=pool_of, **ports)
    await assert_as_long_as_predicted(run, schedule, pool_of, ports)


async def assert_as_long_as_predicted(
    run: Run, schedule: Schedule, pool_of: Mapping[str, str], ports: Mapping[str, Any]
) -> None:
    await run()

    found = step_time(seconds_of(run, pool_of, ports), layout_of(schedule, pool_of, ports))

    measured = [run.monitor.records[step]["timing_s/step"] for step in range(3, 6)]
    assert measured == pytest.approx([found.seconds] * 3)
    for pool, busy in found.busy.items():
        assert run.monitor.records[4][f"pool/{pool}/busy_fraction"] == pytest.approx(busy, abs=0.02)


@pytest.mark.parametrize("slow", [{}, {"generate": 30.0}, {"update_actor": 20.0}, {"update_critic": 20.0}])
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("pools", [("c", "a"), ("f", "a"), ("c", "f")])
@both_models
async def test_one_step_off_takes_as_long_as_the_cost_model_says(
    make_run: MakeRun, model: Model, pools: tuple[str, str], most: int, slow: dict[str, float]
) -> None:
    schedule = replace(schedule_of(ScheduleMode.ONE_STEP_OFF), max_staleness=most)
    pool_of = {**model.pools(*pools), "rollout": "r"}
    run = with_copies(make_run, model, schedule, 8.0, steps=24, pool_of=pool_of)
    run.world.are_lengths_equal = True
    run.world.durations.update(slow)
    await run()

    found = step_time(seconds_of(run, pool_of, model.ports), layout_of(schedule, pool_of, model.ports))

    period = 2 * most
    measured = [run.monitor.records[step]["timing_s/step"] for step in range(9, 9 + period)]
    assert sum(measured) / period == pytest.approx(found.seconds)


def seconds_of(run: Run, pool_of: Mapping[str, str], ports: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase, of one that two pools compute those of both together."""
    taken = {phase: run.world.durations[name] for phase, name in {**NAMES, "reward_model": "reward_model"}.items()}
    left_out = {"values", "update_critic"} if ports.get("has_critic") is False else set()
    left_out |= {name for name in ("ref", "reward_model") if name not in pool_of}
    return {
        phase: seconds / (2 if f"{phase}_copy" in pool_of else 1)
        for phase, seconds in taken.items()
        if phase not in left_out
    }


def layout_of(schedule: Schedule, pool_of: Mapping[str, str], ports: Mapping[str, Any]) -> Layout:
    models = [name for name in ("ref", "reward_model") if f"{name}_copy" in pool_of]
    on_cpu = {"data", "reward", *(f"{name}_copy" for name in models)}
    on_gpus = {role: pool for role, pool in pool_of.items() if role not in on_cpu}
    on_gpus = {role: pool for role, pool in on_gpus.items() if role != "critic" or ports.get("has_critic", True)}
    return Layout(
        on_gpus,
        dict.fromkeys(pool_of.values(), 1),
        schedule,
        shared=[pool_of[role] for role in ports.get("shared", ())],
        copies={name: [pool_of[name], pool_of[f"{name}_copy"]] for name in models},
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

    phase = ForwardPhase.of({role: helper(role) for role in ("ref", REF.copy)}, no_metrics, at_once)
    streamed = StreamedPhases({"ref": phase}, 4)
    for role in ("ref", REF.copy):
        streamed.follow(ChainPhases([], {"ref": role}))
    streamed.add([0, 1, 2], FakeBatch(3, {}, ((0, 0), (1, 0), (2, 0))))
    for _ in range(10):
        await asyncio.sleep(0)
    assert seen == [("ref", ((0, 0), (1, 0))), (REF.copy, ((2, 0),))]

    streamed.drop([1, 2])
    streamed.add([3, 2, 1], FakeBatch(3, {}, ((3, 0), (2, 1), (1, 1))))
    streamed.end()
    gate.set()
    found = await streamed.found()

    assert found["ref"].rows == ((0, 0), (1, 1), (2, 1), (3, 0))
