"""A stop, new settings, being fenced out, and what reaches the operator and the files."""

import json
import threading
from pathlib import Path

import pytest

from ppojob_api.v1alpha1.progress import Activity, Command, LiveSettings, ProgressReply
from ppojob_trainer.checkpoints import FencedOutError
from ppojob_trainer.controller.monitor_port import Uploaded
from ppojob_trainer.main import monitor as monitor_module
from ppojob_trainer.telemetry import TrackedRun
from tests.unit.trainer.main.monitors import RAW, FakeReporter, monitor_of, watched


def test_what_does_not_change_is_in_the_first_record_only(tmp_path: Path, reporter: FakeReporter) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    monitor.once = {"comm_transport/actor/P2P_CUMEM": 2.0}

    monitor.record(1, {"critic/score/mean": 0.25})
    monitor.record(2, {"critic/score/mean": 0.5})
    monitor.close()

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("comm_transport/actor/P2P_CUMEM") for line in lines] == [2.0, None]


def test_until_it_goes_on_a_run_stands_where_its_checkpoint_is(tmp_path: Path, reporter: FakeReporter) -> None:
    before = monitor_of(tmp_path, threading.Event())
    for step in (1, 2, 3):
        before.record(step, {"critic/score/mean": step / 4})
    before.close()

    monitor_of(tmp_path, threading.Event()).start(2)

    assert (reporter.reports[-1].step, reporter.reports[-1].reward) == (2, 0.5)


async def test_a_signal_stops_the_run(tmp_path: Path, reporter: FakeReporter) -> None:
    stop = threading.Event()
    monitor = monitor_of(tmp_path, stop)
    assert not monitor.is_stopping
    stop.set()

    await watched(monitor, lambda: monitor.is_stopping)

    await monitor.wait_for_stop()


async def test_the_operator_stops_the_run(tmp_path: Path, reporter: FakeReporter) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    reporter.reply = ProgressReply(command=Command.STOP)

    await watched(monitor, lambda: monitor.is_stopping)

    assert monitor.is_stopping


async def test_new_settings_come_with_a_reply(tmp_path: Path, reporter: FakeReporter) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    assert monitor.settings.total_steps == 5
    new = LiveSettings(total_steps=9, validate_every_steps=1, checkpoint_every_steps=2, checkpoint_keep=3)
    reporter.reply = ProgressReply(settings=new)

    await watched(monitor, lambda: monitor.settings == new)

    monitor.set_activity(Activity.TRAINING)
    assert (reporter.reports[-1].total_steps, reporter.reports[-1].activity) == (9, Activity.TRAINING)


async def test_epochs_become_steps_when_the_data_is_loaded_and_may_change(
    tmp_path: Path, reporter: FakeReporter
) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    fixed = LiveSettings(total_epochs=2, validate_every_steps=0, checkpoint_every_steps=0, checkpoint_keep=1)
    reporter.reply = ProgressReply(settings=fixed)
    await watched(monitor, lambda: monitor.settings == fixed)
    assert monitor.total_steps == 0

    monitor.count_epochs(40)

    assert (monitor.total_steps, reporter.reports[-1].total_steps) == (80, 80)
    longer = fixed.model_copy(update={"total_epochs": 3})
    reporter.reply = ProgressReply(settings=longer)
    await watched(monitor, lambda: monitor.settings == longer)
    monitor.set_activity(Activity.TRAINING)
    assert (monitor.total_steps, reporter.reports[-1].total_steps) == (120, 120)


def test_a_request_for_a_checkpoint_is_read_and_answered_at_once(tmp_path: Path, reporter: FakeReporter) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    assert monitor.checkpoint_request is None
    reporter.reply = ProgressReply(checkpoint_request="r-1")
    assert monitor.checkpoint_request == "r-1"

    monitor.saved(2, "/data/step-2", None)
    assert not reporter.was_urgent
    monitor.saved(3, "s3://bucket/step-3.attempt-0", "r-1")

    assert reporter.was_urgent
    checkpoint = reporter.reports[-1].checkpoint
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.request) == (3, "r-1")
    assert checkpoint.path == "s3://bucket/step-3.attempt-0"


async def test_an_attempt_that_is_fenced_out_ends_at_once(tmp_path: Path, reporter: FakeReporter) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    reporter.fenced_out.set()

    with pytest.raises(FencedOutError):
        await watched(monitor, lambda: False)


def test_a_step_reaches_the_operator_and_the_files(tmp_path: Path, reporter: FakeReporter) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    monitor.start()

    monitor.record(1, {"critic/score/mean": 0.25})
    monitor.record(2, {"critic/score/mean": 0.5})
    monitor.saved(2, "/data/step-2", None)
    monitor.exported(tmp_path / "model")
    monitor.uploaded(Uploaded("s3://bucket/model"))
    monitor.close()

    last = reporter.reports[-1]
    assert (last.model_address, last.upload_failure) == ("s3://bucket/model", None)
    assert (last.step, last.reward, last.model_path) == (2, 0.5, str(tmp_path / "model"))
    assert last.checkpoint is not None
    assert last.checkpoint.step == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["critic/score/mean"] for line in lines] == [0.25, 0.5]


def test_after_some_steps_the_layout_is_judged_and_the_first_step_is_not_among_them(
    tmp_path: Path, reporter: FakeReporter, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    phases = {"gen": 4.0, "values": 0.1, "update_critic": 0.2, "update_actor": 3.0}
    metrics = {f"timing_s/{phase}": seconds for phase, seconds in phases.items()} | {"pool/critic/busy_fraction": 0.04}
    compiling = {**metrics, "timing_s/values": 100.0}

    with caplog.at_level("INFO"):
        monitor.record(0, {"val-core/score/mean": 0.1})
        monitor.record(1, compiling)
        for step in (2, 3):
            monitor.record(step, metrics)
        assert reporter.reports[-1].recommendation is None
        monitor.record(4, metrics)
        monitor.close()

    last = reporter.reports[-1]
    fewer = "pool critic was 4% busy over the last 3 steps: 1 GPU instead of 2 would cost 1% step time"
    assert last.recommendation is not None
    assert last.recommendation.startswith(fewer)
    assert last.layout_advice is not None
    assert [(pool.name, pool.nodes, pool.gpus_per_node) for pool in last.layout_advice[0].pools] == [
        ("actor", 1, 4),
        ("critic", 1, 1),
    ]
    saved = json.loads((tmp_path / "recommendation.json").read_text())
    assert saved["recommendation"] == last.recommendation
    assert saved["layoutAdvice"] == [advice.to_wire() for advice in last.layout_advice]
    assert last.recommendation in caplog.text


def test_what_the_processes_saw_of_themselves_is_in_the_record(tmp_path: Path, reporter: FakeReporter) -> None:
    monitor = monitor_of(tmp_path, threading.Event())
    monitor.observed = lambda step: {"pool/actor/memory_peak_gb": 10.0 * step}

    monitor.record(2, {"critic/score/mean": 0.5})
    monitor.close()

    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["pool/actor/memory_peak_gb"] == 20.0


def test_a_port_that_another_run_has_does_not_stop_this_one(
    tmp_path: Path, reporter: FakeReporter, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = monitor_of(tmp_path / "a", threading.Event()), monitor_of(tmp_path / "b", threading.Event())

    for monitor in (first, second):
        monitor.record(1, {"critic/score/mean": 0.5})
    for monitor in (first, second):
        monitor.close()

    assert "no /metrics on 0.0.0.0:9464: " in caplog.text
    assert (tmp_path / "b" / "metrics.jsonl").exists()


def test_a_resumed_run_takes_over_the_records_up_to_its_step(tmp_path: Path, reporter: FakeReporter) -> None:
    first = monitor_of(tmp_path, threading.Event())
    for step in (1, 2, 3):
        first.record(step, {"critic/score/mean": step / 10})
    first.close()
    second = monitor_of(tmp_path, threading.Event())

    second.resumed(2)
    second.record(3, {"critic/score/mean": 0.9})
    second.close()

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["critic/score/mean"]) for line in lines] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert reporter.reports[-1].first_step_time is not None


def test_a_run_that_begins_afresh_takes_out_what_an_attempt_without_checkpoint_wrote(
    tmp_path: Path, reporter: FakeReporter
) -> None:
    for value in (0.1, 0.2):
        monitor = monitor_of(tmp_path, threading.Event())
        monitor.record(0, {"val-core/score/mean": value})
        monitor.close()

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["val-core/score/mean"] for line in lines] == [0.2]


def test_a_tracker_is_shown_the_job_without_its_secrets(
    tmp_path: Path, reporter: FakeReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[TrackedRun] = []
    monkeypatch.setattr(monitor_module, "open_trackers", lambda trackers, run: runs.append(run) or [])
    monkeypatch.setitem(RAW, "env", [{"name": "WANDB_API_KEY", "value": "hunter2"}])
    monitor = monitor_of(tmp_path, threading.Event())

    monitor.record(1, {"actor/loss": 0.5})
    monitor.close()

    assert "hunter2" not in str(runs[0].config)
    assert runs[0].config["pools"][0]["gpusPerNode"] == 4
