"""Checkpoints that are written while the steps go on."""

import pytest

from ppojob_api.v1alpha1.training import ScheduleMode
from tests.unit.trainer.controller.conftest import MakeRun

MODES = [ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED]


@pytest.mark.parametrize("mode", MODES)
async def test_the_next_step_does_not_wait_and_the_checkpoint_holds_the_models_of_its_own(
    make_run: MakeRun, mode: ScheduleMode
) -> None:
    run, waiting = make_run(mode, steps=3, save_every=1, write_s=40.0), make_run(mode, steps=3, save_every=1)

    await run()
    await waiting()

    assert run.world.at("update_actor 2", "start") < run.world.at("write 1", "end")
    # Numbers, data position and KL state are those of a save that everything waits for.
    assert run.checkpoints.saved == waiting.checkpoints.saved
    assert run.monitor.saved_steps == [1, 2, 3]
    # Nothing changes the models after the last step, so that one needs no copy of them.
    assert (run.checkpoints.in_background, waiting.checkpoints.in_background) == ([1, 2], [])


async def test_the_metrics_say_how_long_the_loop_stood_still_and_how_long_the_checkpoint_took(
    make_run: MakeRun,
) -> None:
    run, waiting = (make_run(ScheduleMode.SERIAL, steps=4, save_every=2, write_s=write_s) for write_s in (2.0, None))

    await run()
    await waiting()

    saved, written = (run.world.at(f"{what} 2", "end") for what in ("save", "write"))
    started = run.world.at("save 2", "start")
    record = {step: run.monitor.records[step] for step in (1, 2, 3)}
    assert record[2]["timing_s/save_checkpoint"] == pytest.approx(saved - started)
    assert [step for step, metrics in record.items() if "timing_s/checkpoint/write" in metrics] == [3]
    assert record[3]["timing_s/checkpoint/write"] == pytest.approx(written - started)
    # One that is waited for is complete when its step is recorded.
    record = waiting.monitor.records
    assert record[2]["timing_s/checkpoint/write"] == record[2]["timing_s/save_checkpoint"] > 0


async def test_at_most_one_is_being_written(make_run: MakeRun) -> None:
    run = make_run(steps=4, save_every=1, write_s=100.0)

    await run()

    for step in (1, 2, 3):
        assert run.world.at(f"save {step + 1}", "start") >= run.world.at(f"write {step}", "end")


async def test_the_end_of_the_run_waits_for_the_last_one(make_run: MakeRun) -> None:
    run = make_run(steps=2, write_s=500.0)

    outcome = await run()

    assert outcome.is_finished
    assert run.world.at("export", "start") >= run.world.at("write 2", "end")


async def test_a_stop_waits_for_it_too(make_run: MakeRun) -> None:
    run = make_run(ScheduleMode.SERIAL, steps=5, save_every=1, write_s=500.0)
    begin = run.world.phase

    async def stopping(what: str, step: int = 0, num_rows: int | None = None) -> None:
        if (what, step) == ("generate", 2):
            run.monitor.stopping.set()
        await begin(what, step, num_rows)

    run.world.phase = stopping  # type: ignore[method-assign]
    outcome = await run()

    assert (outcome.step, outcome.is_finished) == (1, False)
    assert list(run.checkpoints.saved) == [1]
    assert run.checkpoints.in_background == [1]


async def test_one_that_fails_ends_the_run_at_the_next_step(make_run: MakeRun) -> None:
    run = make_run(ScheduleMode.SERIAL, steps=50, save_every=1, write_s=1.0)
    run.world.failing["write"] = OSError("no space left on the device")

    with pytest.raises(OSError, match="no space left"):
        await run()

    assert run.world.at("save 1", "end") > 0
    assert "update_actor 3" not in run.world.names()
    assert run.monitor.saved_steps == []


async def test_the_last_one_that_fails_is_the_runs_failure(make_run: MakeRun) -> None:
    run = make_run(steps=1, write_s=1.0)
    run.world.failing["write"] = OSError("no space left on the device")

    with pytest.raises(OSError, match="no space left"):
        await run()

    assert run.monitor.exports == []
