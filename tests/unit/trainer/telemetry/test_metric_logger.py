"""Metrics of a step reach every sink; a resumed run has no trace of the steps that it does again."""

import io
import json
import logging
import math
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from ppojob_trainer.telemetry import MetricLogger, MetricsUnreadableError, RunFiles, read_metrics
from ppojob_trainer.telemetry.eta import Eta, in_words
from ppojob_trainer.telemetry.sinks.console import WIDTH, ConsoleSink
from ppojob_trainer.telemetry.sinks.json_lines import JsonLinesSink
from tests.unit.trainer.telemetry.full_disk import room_for


def _open(root: Path, *, resume_step: int = 0, prometheus_port: int | None = None) -> MetricLogger:
    prometheus = None if prometheus_port is None else ("127.0.0.1", prometheus_port)
    return MetricLogger.open(
        RunFiles(root), total_steps=8, resume_step=resume_step, prometheus=prometheus, is_console=False
    )


def _run(root: Path, steps: range, *, resume_step: int = 0) -> None:
    with _open(root, resume_step=resume_step) as logger:
        for step in steps:
            logger.log(step, {"critic/score/mean": step / 10})


def _steps(root: Path) -> list[float | None]:
    return [record["step"] for record in read_metrics(RunFiles(root).metrics)]


def test_a_step_is_one_json_object_with_step_and_time(tmp_path: Path) -> None:
    with _open(tmp_path) as logger:
        logger.log(1, {"critic/score/mean": 0.25, "actor/lr": 1e-6})

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert {name: record[name] for name in record if name != "time"} == {
        "step": 1,
        "critic/score/mean": 0.25,
        "actor/lr": 1e-6,
    }
    assert record["time"] > 1.6e9


def test_a_line_is_there_before_the_next_step(tmp_path: Path) -> None:
    with _open(tmp_path) as logger:
        logger.log(1, {"a": 1.0})
        assert _steps(tmp_path) == [1]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with _open(tmp_path) as logger:
        logger.log(1, {"actor/grad_norm": math.nan, "critic/vf_loss": math.inf, "a": 1.0})

    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["actor/grad_norm"], record["critic/vf_loss"], record["a"]) == (None, None, 1.0)


def test_a_resumed_run_cuts_the_steps_that_it_does_again(tmp_path: Path) -> None:
    _run(tmp_path, range(0, 7))

    _run(tmp_path, range(5, 9), resume_step=4)

    assert _steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_a_run_that_begins_afresh_cuts_everything(tmp_path: Path) -> None:
    _run(tmp_path, range(0, 7))

    _open(tmp_path).close()

    assert _steps(tmp_path) == []


def test_a_torn_line_is_cut(tmp_path: Path) -> None:
    _run(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1')

    assert _steps(tmp_path) == [1, 2]
    _run(tmp_path, range(3, 4), resume_step=2)

    assert _steps(tmp_path) == [1, 2, 3]


def test_two_lines_of_a_step_are_one_record(tmp_path: Path) -> None:
    with _open(tmp_path) as logger:
        logger.log(1, {"a": 1.0, "b": 1.0})
        logger.log(1, {"b": 2.0})

    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["a"], record["b"]) == (1.0, 2.0)


@pytest.mark.parametrize("line", ["not json", "[1]", '{"time": 1}', '{"step": "one"}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')

    with pytest.raises(MetricsUnreadableError, match=rf"{path}, line 2, is not a metrics record"):
        read_metrics(path)


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []


def _scalars(root: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(RunFiles(root).tensorboard))
    events.Reload()
    return [(event.step, round(event.value, 3)) for event in events.Scalars(tag)]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    _run(tmp_path, range(1, 7))
    _run(tmp_path, range(5, 7), resume_step=4)

    assert _scalars(tmp_path, "critic/score/mean") == [(step, step / 10) for step in range(1, 7)]


def test_prometheus_serves_the_last_step(tmp_path: Path) -> None:
    with _open(tmp_path, prometheus_port=0) as logger:
        logger.log(1, {"actor/ppo_kl": 0.5})
        logger.log(2, {"actor/ppo_kl": 0.25})
        sink = next(sink for sink in logger._sinks if hasattr(sink, "port"))
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=120) as answer:
            text = answer.read().decode()

    assert "ppojob_actor_ppo_kl 0.25" in text
    assert "ppojob_step 2.0" in text


def test_a_picture_is_drawn_at_the_end(tmp_path: Path) -> None:
    _run(tmp_path, range(1, 4))

    assert RunFiles(tmp_path).plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_step_has_no_picture(tmp_path: Path) -> None:
    _open(tmp_path).close()

    assert not RunFiles(tmp_path).plot.exists()


class _SickSink:
    def __init__(self) -> None:
        self.num_writes = 0

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self.num_writes += 1
        raise OSError("disk full")

    def close(self) -> None:
        raise OSError("disk full")


class _ListSink:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.is_closed = False

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def test_a_sink_that_fails_is_logged_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sick, healthy = _SickSink(), _ListSink()
    with caplog.at_level(logging.WARNING), MetricLogger([sick, healthy], Eta(8)) as logger:
        for step in (1, 2, 3):
            logger.log(step, {})
        assert len(caplog.records) == 1

    assert "_SickSink lost metrics, training continues: OSError: disk full" in caplog.text
    assert (sick.num_writes, healthy.steps, healthy.is_closed) == (3, [1, 2, 3], True)


def test_metrics_of_a_step_that_a_full_disk_refuses_do_not_spoil_those_of_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, resume_step=0)
    numbers = {f"metric {number}": 1 / 3 for number in range(400)}
    sink.write(1, 1.0, numbers)
    for step in (2, 3):
        with room_for(path, 1000), pytest.raises(OSError, match="File too large"):
            sink.write(step, 1.0, numbers)
    sink.write(4, 1.0, numbers)
    sink.close()

    assert [record["step"] for record in read_metrics(path)] == [1, 4]


def test_closing_twice_does_nothing_more(tmp_path: Path) -> None:
    logger = _open(tmp_path)
    logger.close()
    logger.close()


def _table(steps: int) -> list[str]:
    out, eta = io.StringIO(), Eta(8)
    sink = ConsoleSink(eta, console=Console(file=out, width=WIDTH))
    for step in range(1, steps + 1):
        eta.tick(step, 20.0 * step)
        metrics = {"critic/score/mean": 0.25, "actor/ppo_kl": math.nan, "timing_s/step": 20.0}
        sink.write(step, 20.0 * step, metrics)
    return out.getvalue().splitlines()


def test_the_console_has_a_row_per_step_with_what_is_left() -> None:
    head, first, second = _table(2)

    assert head.split() == [
        "step",
        "reward",
        "validation",
        "kl",
        "response",
        "tokens",
        "tokens/s/gpu",
        "s/step",
        "left",
    ]
    assert first.split() == ["1/8", "━╸", "0.250", "-", "nan", "-", "-", "20.0", "-"]
    assert second.split() == ["2/8", "━━━", "0.250", "-", "nan", "-", "-", "20.0", "2", "min"]
    assert len({len(head), len(first), len(second)}) == 1


def test_the_head_of_the_table_comes_again() -> None:
    assert sum("reward" in line for line in _table(45)) == 3


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (0, "0 s"), (99.4, "99 s"), (420, "7 min"), (3 * 3600 + 300, "3 h 05 min"), (90 * 60, "90 min")],
)
def test_a_duration_is_said_for_people(seconds: float | None, words: str) -> None:
    assert in_words(seconds) == words


def test_the_time_left_follows_the_pace_and_the_length() -> None:
    eta = Eta(10)
    eta.tick(1, 100.0)
    assert eta.seconds is None
    eta.tick(3, 120.0)
    assert eta.seconds == 70.0
    eta.total_steps = 4
    assert eta.seconds == 10.0
    eta.tick(5, 140.0)
    assert eta.seconds == 0.0
