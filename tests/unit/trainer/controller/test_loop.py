"""Resume, validation, checkpoints, live settings, the end, and graceful stops."""

import asyncio

import pytest

from ppojob_api.v1alpha1.progress import Activity, LiveSettings
from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.controller.storage_ports import Restored
from tests.unit.trainer.controller.conftest import MakeRun, StopAt

MODES = [ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED]


async def test_a_run_validates_before_every_nth_and_after(make_run: MakeRun) -> None:
    run = make_run(steps=5, validate_every=2)

    await run()

    validated = [step for step, record in run.monitor.records.items() if "val-core/score/mean" in record]
    assert validated == [0, 2, 4, 5]


async def test_validate_every_0_validates_never(make_run: MakeRun) -> None:
    run = make_run(steps=2)

    await run()

    assert "validate" not in run.world.names()


async def test_the_validation_of_a_step_reads_the_weights_of_that_step(make_run: MakeRun) -> None:
    run = make_run(steps=2, validate_every=1)

    await run()

    first = run.world.at("push 1", "end")
    validations = [time for time, name, edge in run.world.events if (name, edge) == ("validate", "start")]
    assert validations[1] == first
    assert run.world.at("generate 2", "start") >= validations[1] + run.world.durations["validate"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_checkpoint_waits_for_the_critic_and_holds_the_models_of_its_step(
    make_run: MakeRun, mode: ScheduleMode
) -> None:
    run = make_run(mode, steps=3, save_every=2)
    alone = make_run(ScheduleMode.SERIAL, steps=2)

    await run()
    await alone()

    assert list(run.checkpoints.saved) == [2, 3]
    assert run.world.at("save 2", "start") >= run.world.at("update_critic 2", "end")
    state, actor, critic = run.checkpoints.saved[2]
    assert (actor, critic) == (alone.world.actor, alone.world.critic)
    assert state["data"] == {"position": 2}, "although the prompts of step 3 may be out"
    assert state["kl"] == alone.checkpoints.saved[2][0]["kl"], "although step 3 may have moved the controller"


async def test_every_0_writes_the_last_checkpoint_alone_and_exports(make_run: MakeRun) -> None:
    run = make_run(steps=3)

    outcome = await run()

    assert (outcome.step, outcome.is_finished) == (3, True)
    assert run.monitor.saved_steps == [3]
    assert [str(path) for path in run.monitor.exports] == ["model"]
    assert run.monitor.activities[-1] is Activity.FINISHED


async def test_a_resumed_run_continues_after_its_step_with_the_state_of_the_checkpoint(make_run: MakeRun) -> None:
    state = {"data": {"position": 2}, "kl": {"type": "Adaptive", "coefficient": 0.25}}
    run = make_run(steps=4, validate_every=1, found=Restored(2, state))

    await run()

    assert run.monitor.resumed_step == 2
    assert list(run.monitor.records) == [3, 4], "and no validation before training"
    assert run.world.names()[:2] == ["push 2", "prompts 3"], "the engines first get the checkpoint's weights"
    assert run.monitor.records[3]["actor/reward_kl_penalty_coeff"] == 0.25


async def test_a_run_that_was_done_already_exports_and_ends(make_run: MakeRun) -> None:
    state = {"data": {"position": 3}, "kl": {"type": "Adaptive", "coefficient": 0.25}}
    run = make_run(steps=3, found=Restored(3, state))

    outcome = await run()

    assert outcome.is_finished
    assert run.world.names() == ["push 3", "export"]


async def test_the_length_of_a_run_may_change_while_it_runs(make_run: MakeRun) -> None:
    run = make_run(steps=5, save_every=0)
    shorter = LiveSettings(total_steps=2, validate_every_steps=0, checkpoint_every_steps=0, checkpoint_keep=1)
    original = run.monitor.record

    def record(step: int, metrics: object) -> None:
        original(step, metrics)  # type: ignore[arg-type]
        run.monitor.settings = shorter

    run.monitor.record = record  # type: ignore[method-assign]

    outcome = await run()

    assert (outcome.step, outcome.is_finished) == (2, True)
    assert run.monitor.saved_steps == [2]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write_s", [None, 1000.0])
async def test_a_checkpoint_that_is_asked_for_is_written_once_and_nothing_is_stopped(
    make_run: MakeRun, mode: ScheduleMode, write_s: float | None
) -> None:
    run = make_run(mode, steps=6, save_every=0, write_s=write_s)
    original = run.monitor.record

    def record(step: int, metrics: object) -> None:
        original(step, metrics)  # type: ignore[arg-type]
        if step == 1:
            # Each reply contains it until the trainer has reported the answer.
            run.monitor.checkpoint_request = "first"

    run.monitor.record = record  # type: ignore[method-assign]

    outcome = await run()

    assert (outcome.step, outcome.is_finished) == (6, True)
    assert (run.monitor.saved_steps, run.monitor.answers) == ([2, 6], ["first", "first"])
    assert sorted(run.monitor.records) == [1, 2, 3, 4, 5, 6]


async def test_a_later_request_is_another_one(make_run: MakeRun) -> None:
    run = make_run(ScheduleMode.SERIAL, steps=6)
    requests = {1: "first", 2: "first", 3: "second"}
    original = run.monitor.record

    def record(step: int, metrics: object) -> None:
        original(step, metrics)  # type: ignore[arg-type]
        run.monitor.checkpoint_request = requests.get(step)

    run.monitor.record = record  # type: ignore[method-assign]

    await run()

    answers = dict(zip(run.monitor.saved_steps, run.monitor.answers, strict=True))
    assert answers == {2: "first", 4: "second", 6: "second"}


@pytest.mark.parametrize("phase", ["generate 2", "old_log_prob 2", "advantages 2"])
async def test_a_stop_before_the_updates_drops_the_step_and_saves_the_one_before(
    make_run: MakeRun, stop_at: StopAt, phase: str
) -> None:
    run = make_run(steps=4)

    outcome = await stop_at(run, phase)

    assert (outcome.step, outcome.is_finished) == (1, False)
    assert list(run.checkpoints.saved) == [1]
    assert "update_actor 2" not in run.world.names()
    assert run.exports.num_exports == 0


@pytest.mark.parametrize("phase", ["update_actor 2", "update_critic 2", "push 2"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_stop_during_the_updates_finishes_the_step(
    make_run: MakeRun, stop_at: StopAt, mode: ScheduleMode, phase: str
) -> None:
    run = make_run(mode, steps=4)

    outcome = await stop_at(run, phase)

    assert (outcome.step, outcome.is_finished) == (2, False)
    assert list(run.checkpoints.saved) == [2]
    assert 2 in run.monitor.records
    assert "update_critic 2" in run.world.names("end")


async def test_a_stop_in_the_first_step_saves_nothing(make_run: MakeRun, stop_at: StopAt) -> None:
    run = make_run(steps=4)

    outcome = await stop_at(run, "generate 1")

    assert outcome.step == 0
    assert run.checkpoints.saved == {}


async def test_a_stop_during_a_validation_keeps_the_step(make_run: MakeRun, stop_at: StopAt) -> None:
    run = make_run(steps=4, validate_every=2)
    run.monitor.records[0] = {}

    outcome = await stop_at(run, "push 2")

    assert outcome.step == 2
    assert "val-core/score/mean" not in run.monitor.records[2]


async def test_nothing_is_left_running_when_a_run_ends(make_run: MakeRun, stop_at: StopAt) -> None:
    run = make_run(steps=4)

    await stop_at(run, "old_log_prob 2")
    await asyncio.sleep(0)

    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_metrics_have_verls_names(make_run: MakeRun) -> None:
    run = make_run(steps=1)

    await run()

    record = run.monitor.records[1]
    assert record["response_length/mean"] == 5
    assert record["response_length/clip_ratio"] == 0.5
    assert record["perf/total_num_tokens"] == 20
    assert record["perf/throughput"] == pytest.approx(20 / (record["timing_s/step"] * 3))
    assert record["timing_per_token_ms/gen"] == pytest.approx(1000 * 10 / 10)
    assert record["training/global_step"] == 1
    assert record["actor/reward_kl_penalty_coeff"] == 0.1


async def test_a_slow_checkpoint_holds_the_state_of_its_own_step(make_run: MakeRun) -> None:
    quick, slow = make_run(steps=3, save_every=1), make_run(steps=3, save_every=1)
    slow.world.durations["save"] = 500.0

    await quick()
    await slow()

    assert slow.checkpoints.saved == quick.checkpoints.saved
    assert slow.world.at("update_actor 2", "start") >= slow.world.at("save 1", "end")
