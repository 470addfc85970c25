"""The picture of timings: medians without the first steps, lanes of a real step, busy shares without a trace."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from ppojob_trainer.telemetry import TraceWriter, timing_plot, write_advice
from ppojob_trainer.telemetry.trace import Span


def _run(folder: Path, *, is_traced: bool) -> Path:
    """Write three steps of 10, 2 and 4 seconds: gen, then the update, with the reward beside the values."""
    folder.mkdir(parents=True)
    records, begin = [], 100.0
    trace = TraceWriter(folder / "trace.json") if is_traced else None
    for step, seconds in ((1, 10.0), (2, 2.0), (3, 4.0)):
        metrics = {"timing_s/step": seconds, "timing_s/gen": seconds / 2, "timing_s/update_actor": seconds / 2}
        metrics |= {"timing_s/testing": 50.0, "pool/a/busy_fraction": 1.0, "pool/c/busy_fraction": 0.25}
        metrics |= {"pool/c/memory_peak_gb": 30.0 - seconds, "pool/c/gpu_utilization": 0.1 * step}
        records.append({"step": step, "time": begin, **metrics})
        if trace is not None:
            middle, end = begin + seconds / 2, begin + seconds
            trace.record("gen", pool="a", role="rollout", start=begin, end=middle, step=step)
            trace.record("reward", pool="", role="reward", start=middle, end=middle + 0.1, step=step)
            trace.record("update_actor", pool="a", role="actor", start=middle, end=end, step=step)
            # The critic goes on beside the next step's generation.
            trace.record("update_critic", pool="c", role="critic", start=middle, end=end + 0.5, step=step)
        begin += seconds
    if trace is not None:
        trace.close()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


def _timing(folder: Path) -> timing_plot.Timing:
    return timing_plot._timing(timing_plot.load_runs([folder])[0])


def test_medians_of_a_short_run_leave_out_the_first_step_and_what_is_not_of_each_step(tmp_path: Path) -> None:
    timing = _timing(_run(tmp_path / "run", is_traced=False))

    assert timing.phases == {"gen": 1.5, "update_actor": 1.5}
    assert (timing.step_seconds, timing.num_steps, timing.lanes) == (3.0, 2, {})


def test_medians_leave_out_the_first_three_steps(tmp_path: Path) -> None:
    records = [
        {
            "step": step,
            "time": 0.0,
            "timing_s/step": seconds,
            "timing_s/gen": 1.0 * step,
            "pool/a/busy_fraction": 0.1 * step,
        }
        for step, seconds in enumerate([90.0, 80.0, 70.0, 5.0, 30.0, 6.0, 7.0], start=1)
    ]
    records[4]["timing_s/ref"] = 3.0
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))

    timing = _timing(tmp_path)

    assert (timing.step_seconds, timing.num_steps, timing.shown_step) == (6.5, 4, 6)
    assert timing.phases == {"gen": 5.5, "ref": 0.0}, "a phase of one step of four is not typical"
    assert timing_plot._use_of_pool(timing.run, "a") == ["55% busy"]


def test_lanes_are_those_of_the_median_step_with_what_reaches_into_it(tmp_path: Path) -> None:
    timing = _timing(_run(tmp_path / "run", is_traced=True))

    assert timing.shown_step == 2
    shown = {
        lane: [(span.name, span.step, round(span.start, 3), round(span.end, 3)) for span in spans]
        for lane, spans in timing.lanes.items()
    }
    assert shown == {
        "c": [("update_critic", 1, 0.0, 0.5), ("update_critic", 2, 1.0, 2.0)],
        "a": [("gen", 2, 0.0, 1.0), ("update_actor", 2, 1.0, 2.0)],
        "CPU": [("reward", 2, 1.0, 1.1)],
    }


def test_a_step_that_was_done_again_is_shown_as_it_was_the_last_time() -> None:
    spans = [
        Span("gen", "a", "rollout", 2, 10.0, 11.0),
        Span("data", "", "data", 2, 99.9, 100.0),
        Span("gen", "a", "rollout", 2, 100.0, 101.0),
        # What a checkpoint asks of the data.
        Span("data", "", "data", 2, 150.0, 150.1),
    ]

    lanes = timing_plot._lanes(spans, 2, 2.0)

    assert [round(span.start, 3) for span in lanes["a"]] == [0.1]


def test_phases_of_a_pool_at_the_same_time_are_in_separate_tracks() -> None:
    spans = [Span("a", "p", "x", 1, 0, 2), Span("b", "p", "y", 1, 1, 3), Span("c", "p", "x", 1, 2, 4)]

    found = {span.name: (middle, height) for middle, height, span in timing_plot._in_tracks(spans, 0.0)}

    assert found["a"] == found["c"]
    assert found["a"][0] < found["b"][0]
    assert found["b"][1] == timing_plot._LANE / 2


def test_runs_are_drawn_beside_each_other_with_their_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [_run(tmp_path / "one", is_traced=True), _run(tmp_path / "two", is_traced=False)]
    write_advice(runs[0] / "recommendation.json", "1 GPU would do", [])
    write_advice(runs[1] / "recommendation.json", "", [])
    saved: list[Figure] = []
    original = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (saved.append(figure), original(figure, *a, **k)))

    target = timing_plot.plot_timing(runs, tmp_path / "timing.png", ["standard", "split"])

    assert target.read_bytes().startswith(b"\x89PNG")
    bars, *panels = saved[0].get_axes()
    assert [tick.get_text() for tick in bars.get_xticklabels()] == ["standard\nsteps: 2", "split\nsteps: 2"]
    assert [axes.get_title(loc="left") for axes in panels] == ["standard: step 2", "split"]
    assert [tick.get_text() for tick in panels[0].get_yticklabels()] == ["pool a", "pool c", "CPU"]
    assert "25% busy\n25% GPU use\n28.0 GB peak" in [text.get_text() for text in panels[1].texts]
    assert [axes.get_xlabel() for axes in panels] == ["1 GPU would do", "seconds from the beginning of the step"]


def test_labels_must_be_as_many_as_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 labels for 1 runs"):
        timing_plot.plot_timing([_run(tmp_path / "one", is_traced=False)], tmp_path / "t.png", ["a", "b"])


def test_a_run_without_a_step_is_no_timing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "val-core/score/mean": 0.5}\n')

    with pytest.raises(ValueError, match="no timing of a step yet"):
        timing_plot.plot_timing([tmp_path], tmp_path / "t.png")
