"""The trace can be opened at any moment: one process per pool, one lane per role."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.telemetry import TraceWriter
from ppojob_trainer.telemetry.trace import read_trace
from tests.unit.trainer.telemetry.full_disk import room_for


def _record(trace: TraceWriter, name: str, pool: str, role: str, start: float, step: int = 1) -> None:
    trace.record(name, pool=pool, role=role, start=start, end=start + 0.5, step=step)


def _events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def _phases(path: Path) -> list[str]:
    return [event["name"] for event in _events(path) if event["ph"] == "X"]


def test_a_phase_has_its_times_and_its_lane(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json")
    _record(trace, "gen", "actor", "rollout", 100.0, step=3)
    _record(trace, "update_critic", "critic", "critic", 100.25)
    _record(trace, "update_actor", "actor", "actor", 100.5)
    trace.close()

    events = _events(tmp_path / "trace.json")
    gen, critic, actor = (event for event in events if event["ph"] == "X")
    assert (gen["ts"], gen["dur"], gen["args"]) == (100_000_000, 500_000, {"step": 3})
    assert gen["pid"] == actor["pid"] != critic["pid"]
    assert len({gen["tid"], critic["tid"], actor["tid"]}) == 3
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"
    }
    assert names["process_name", gen["pid"], gen["tid"]] == "pool actor"
    assert names["thread_name", critic["pid"], critic["tid"]] == "critic"


def test_a_span_is_recorded_also_where_it_raises(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json")
    with pytest.raises(KeyError), trace.span("gen", pool="a", role="r", step=1):
        raise KeyError
    trace.close()

    assert _phases(tmp_path / "trace.json") == ["gen"]


def test_before_the_end_only_the_bracket_is_missing(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json")
    _record(trace, "gen", "a", "r", 1.0)

    text = (tmp_path / "trace.json").read_text()

    trace.close()
    assert [event["name"] for event in json.loads(text + "]")][-1] == "gen"


@pytest.mark.parametrize("tail", ["", "\n]\n", ',\n{"name": "torn", "ph'], ids=["killed", "closed", "torn"])
def test_a_resumed_run_continues_in_the_same_lanes(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path)
    _record(trace, "gen", "b", "rollout", 1.0)
    _record(trace, "ref", "a", "ref", 1.0)
    text = path.read_text()
    trace.close()
    path.write_text(text + tail)

    again = TraceWriter(path)
    _record(again, "ref", "a", "ref", 9.0)
    _record(again, "adv", "a", "critic", 9.0)
    again.close()

    assert _phases(path) == ["gen", "ref", "ref", "adv"]
    gen, first, second, new = (event for event in _events(path) if event["ph"] == "X")
    assert (first["pid"], first["tid"]) == (second["pid"], second["tid"])
    assert new["pid"] == first["pid"]
    assert len({gen["tid"], first["tid"], new["tid"]}) == 3


@pytest.mark.parametrize("room", [0, 30, 150], ids=["nothing", "a part of an event", "one event of two"])
def test_what_a_full_disk_refuses_is_left_out_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path)
    _record(trace, "gen", "a", "rollout", 1.0)
    with room_for(path, room):
        _record(trace, "gen", "a", "rollout", 2.0)
        _record(trace, "values", "b", "critic", 2.0)
        _record(trace, "values", "b", "critic", 3.0)
    _record(trace, "values", "b", "critic", 4.0)
    trace.close()

    assert [span.start for span in read_trace(path) if span.pool == "b"] == [4.0]
    assert _phases(path)[0] == "gen"
    [warning] = [record.getMessage() for record in caplog.records]
    assert "trace.json lost phases, training continues: " in warning


def test_an_empty_trace_is_an_empty_list(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json")
    trace.close()
    trace.close()

    assert _events(tmp_path / "trace.json") == []


def test_a_long_run_does_not_fill_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppojob_trainer.telemetry.trace.MAX_EVENTS", 5)
    trace = TraceWriter(tmp_path / "trace.json")
    for step in range(10):
        _record(trace, "gen", "a", "r", 1.0 * step)
    trace.close()

    assert len(_events(tmp_path / "trace.json")) == 5
