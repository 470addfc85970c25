"""A schedule changes when things happen and never what is computed."""

import pytest

from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.controller.schedule import schedule_of
from tests.unit.trainer.controller.conftest import MakeRun

MODES = [ScheduleMode.SERIAL, ScheduleMode.PARALLEL_UPDATE, ScheduleMode.OVERLAPPED]
TIMES = ("timing", "perf/throughput", "perf/time_per_step", "pool/", "overlap/")


async def test_all_modes_give_the_same_numbers(make_run: MakeRun) -> None:
    numbers = []
    for mode in MODES:
        run = make_run(mode, steps=4, validate_every=2, save_every=2)
        await run()
        records = {
            step: {name: value for name, value in record.items() if not name.startswith(TIMES)}
            for step, record in run.monitor.records.items()
        }
        numbers.append((records, run.world.actor, run.world.critic, run.checkpoints.saved))

    assert numbers[0] == numbers[1] == numbers[2]
    assert set(numbers[0][0]) == {0, 1, 2, 3, 4}


async def test_more_overlap_takes_less_time(make_run: MakeRun) -> None:
    seconds = []
    for mode in MODES:
        run = make_run(mode, steps=4)
        await run()
        seconds.append(run.world.time.now)

    assert seconds[0] > seconds[1] > seconds[2]


async def test_the_saved_time_is_what_serial_would_have_taken_longer(make_run: MakeRun) -> None:
    run = make_run(ScheduleMode.PARALLEL_UPDATE, steps=1)

    await run()

    record = run.monitor.records[1]
    # update_actor 5 s beside update_critic 8 s.
    assert record["overlap/saved_s"] == pytest.approx(5.0)
    assert record["timing_s/update_critic"] == pytest.approx(8.0)
    assert record["timing_s/step"] == pytest.approx(0.1 + 10 + 2.5 + 3 + 2 + 1 + 0.5 + 8 + 1)


def test_auto_must_be_resolved_before() -> None:
    with pytest.raises(ValueError, match="is not resolved"):
        schedule_of(ScheduleMode.AUTO)
