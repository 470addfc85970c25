"""A push that waits for an engine: a stop or a failed generation ends the wait, and the finished step is saved."""

from __future__ import annotations

import asyncio

import pytest

from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.controller.errors import PhaseTimeoutError
from tests.unit.trainer.controller.conftest import MakeRun, Run
from tests.unit.trainer.controller.fake_world import Loss
from tests.unit.trainer.controller.test_in_flight_updates import in_flight
from tests.unit.trainer.controller.test_lost_engines import ALONE, MODES
from tests.unit.trainer.controller.test_one_step_off import POOLS, off

LONG_S = 900.0


def wait_after_update(run: Run, step: int, *, is_stopped: bool) -> list[float]:
    """Let the push after a step wait long for an engine; return a list that gets the time at which the wait begins."""
    weights, begun = run.ppo._ports.weights, list[float]()
    wait = weights.wait_for_engine

    async def wait_for_engine() -> None:
        if not begun and (f"update_actor {step}", "end") in [(name, edge) for _, name, edge in run.world.events]:
            begun.append(run.world.time.now)
            if is_stopped:
                run.monitor.stopping.set()
            await run.world.time.sleep(LONG_S)
        await wait()

    weights.wait_for_engine = wait_for_engine  # type: ignore[method-assign]
    return begun


@pytest.mark.parametrize("mode", MODES)
async def test_a_stop_saves_the_step_whose_weights_nobody_can_get(make_run: MakeRun, mode: ScheduleMode) -> None:
    whole, run = (make_run(mode, steps=4, pool_of=ALONE) for _ in range(2))
    await whole()
    begun = wait_after_update(run, 2, is_stopped=True)

    outcome = await run()

    assert (outcome.step, outcome.is_finished) == (2, False)
    assert run.world.time.now < begun[0] + LONG_S / 2
    assert max(run.checkpoints.saved) == 2
    assert run.checkpoints.saved[2][1] == whole.world.actors[2], "with the update"
    assert max(run.monitor.records) == 2


async def test_a_stop_of_one_step_off_saves_it_too(make_run: MakeRun) -> None:
    run = make_run(off(1), steps=4, pool_of=POOLS)
    begun = wait_after_update(run, 2, is_stopped=True)

    outcome = await run()

    assert (outcome.step, outcome.is_finished) == (2, False)
    assert run.world.time.now < begun[0] + LONG_S / 2
    assert max(run.checkpoints.saved) == 2


async def test_a_stop_ends_the_wait_for_a_validation_too(make_run: MakeRun) -> None:
    """With two steps of staleness, the engines get the weights after step 3 for the validation alone."""
    run = make_run(off(2), steps=6, validate_every=1, pool_of=POOLS)
    begun = wait_after_update(run, 3, is_stopped=True)

    outcome = await run()

    assert (outcome.step, outcome.is_finished) == (3, False)
    assert run.world.time.now < begun[0] + LONG_S / 2
    assert max(run.checkpoints.saved) == 3


async def test_a_process_that_does_not_answer_while_a_push_waits_ends_at_the_limit_of_the_phase(
    make_run: MakeRun,
) -> None:
    run = make_run(ScheduleMode.OVERLAPPED, steps=3, pool_of=ALONE)
    run.loop._phases._timeout_s = 3

    async def never() -> None:
        await asyncio.Event().wait()

    run.ppo._ports.weights.wait_for_engine = never  # type: ignore[method-assign]

    with pytest.raises(PhaseTimeoutError, match="update_weights"):
        await asyncio.wait_for(run(), 60)


async def test_in_flight_the_loss_of_the_last_engine_ends_the_wait(make_run: MakeRun) -> None:
    run = make_run(in_flight(1), steps=5, pool_of=POOLS)
    run.world.durations["generate"] = 30.0
    begun = wait_after_update(run, 2, is_stopped=False)
    last = RuntimeError("the last engine was lost")
    run.world.losses["", 0, 3] = Loss(5.0, failure=last)

    with pytest.raises(RuntimeError) as found:
        await run()

    assert found.value is last
    assert run.world.time.now < begun[0] + LONG_S / 2
