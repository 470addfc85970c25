"""Which steps are exported, and how uploads run beside the steps."""

from __future__ import annotations

import pytest

from ppojob_api.v1alpha1.reported import UploadFailure
from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.controller.monitor_port import Uploaded
from ppojob_trainer.controller.storage_ports import Restored
from tests.unit.trainer.controller.conftest import Exporting, MakeRun, StopAt

FAILED = Uploaded(None, UploadFailure(reason="UploadFailed", message="the store does not answer"))
KL = {"data": {"position": 2}, "kl": {"type": "Adaptive", "coefficient": 0.25}}


@pytest.mark.parametrize("mode", [ScheduleMode.SERIAL, ScheduleMode.OVERLAPPED])
async def test_each_checkpoint_is_exported_once_and_the_step_is_recorded_before(
    make_run: MakeRun, mode: ScheduleMode
) -> None:
    run = make_run(mode, steps=5, save_every=2, export=Exporting(is_each=True))
    recorded: list[list[int]] = []
    export = run.exports.export

    async def watched(step: int, keep: int) -> object:
        recorded.append([step, *run.monitor.records])
        return await export(step, keep)

    run.exports.export = watched  # type: ignore[method-assign, assignment]

    await run()

    assert [(step, step in records) for step, *records in recorded] == [(2, True), (4, True), (5, True)]
    assert run.monitor.saved_steps == [2, 4, 5]


async def test_a_run_without_a_target_uploads_nothing(make_run: MakeRun) -> None:
    run = make_run(steps=2)

    await run()

    assert run.monitor.uploads == []
    assert "upload 2" not in run.world.names()


async def test_the_end_of_a_run_waits_for_the_upload(make_run: MakeRun) -> None:
    run = make_run(steps=2, export=Exporting(upload_s=500.0))

    outcome = await run()

    assert outcome.is_finished
    assert run.monitor.uploads == [Uploaded("s3://bucket/step-2")]
    assert run.world.time.now > 500


async def test_steps_continue_during_an_upload_and_the_next_export_waits_for_it(make_run: MakeRun) -> None:
    run = make_run(ScheduleMode.SERIAL, steps=4, save_every=2, export=Exporting(is_each=True, upload_s=1000.0))

    await run()

    names = run.world.names()
    assert names.index("upload 2") < names.index("generate 3")
    assert run.world.at("generate 3", "start") < run.world.at("upload 2", "end")
    ends = [event for event in run.world.names("end") if event.startswith(("upload", "export"))]
    assert ends == ["export", "upload 2", "export", "upload 4"]


async def test_an_upload_that_failed_ends_nothing(make_run: MakeRun) -> None:
    run = make_run(steps=2, export=Exporting(upload_s=1.0))
    run.exports.results = [FAILED]

    outcome = await run()

    assert outcome.is_finished
    assert run.monitor.uploads == [FAILED]


async def test_a_stop_during_the_last_upload_leaves_it_to_the_next_attempt(make_run: MakeRun, stop_at: StopAt) -> None:
    run = make_run(steps=2, export=Exporting(upload_s=1000.0))

    outcome = await stop_at(run, "upload 2")

    assert (outcome.step, outcome.is_finished) == (2, False)
    assert run.monitor.uploads == []
    again = make_run(steps=2, export=Exporting(upload_s=1000.0), found=Restored(2, KL))
    assert (await again()).is_finished
    assert again.monitor.uploads == [Uploaded("s3://bucket/step-2")]


@pytest.mark.parametrize("phase", ["generate 3", "update_actor 3"])
async def test_a_stop_does_not_wait_for_an_upload(make_run: MakeRun, stop_at: StopAt, phase: str) -> None:
    run = make_run(steps=6, save_every=2, export=Exporting(is_each=True, upload_s=100_000.0))

    outcome = await stop_at(run, phase)

    assert not outcome.is_finished
    assert "upload 2" not in run.world.names("end")
    assert run.monitor.saved_steps[-1] == outcome.step, "the checkpoint of its last step is saved"


async def test_a_stop_while_an_export_waits_for_an_upload_drops_both(make_run: MakeRun) -> None:
    run = make_run(steps=6, save_every=2, export=Exporting(is_each=True, upload_s=100_000.0))
    saved = run.monitor.saved

    def stop_later(step: int, location: str, request: str | None) -> None:
        saved(step, location, request)
        if step == 4:
            run.monitor.stopping.set()

    run.monitor.saved = stop_later  # type: ignore[method-assign]

    outcome = await run()

    assert (outcome.step, outcome.is_finished) == (4, False)
    assert "upload 2" not in run.world.names("end")
    assert 4 in run.monitor.records
    assert run.exports.num_exports == 1


async def test_an_upload_that_an_attempt_left_is_made_by_the_next_one(make_run: MakeRun) -> None:
    run = make_run(steps=4, found=Restored(2, KL), export=Exporting(is_each=True, upload_s=1.0, left=(1, 2, 3)))

    await run()

    assert [upload.address for upload in run.monitor.uploads] == ["s3://bucket/step-2", "s3://bucket/step-4"]
    assert run.exports.num_exports == 1
