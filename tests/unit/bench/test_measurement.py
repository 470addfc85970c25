"""What is read from the runs of the benchmark, and the cost model's table over them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from ppojob_trainer.telemetry.trace import Span, TraceWriter
from tests.bench import predictions, report, whole_run, workload
from tests.bench.floors import sync_floor
from tests.bench.layouts import layout
from tests.bench.measurement import Result, Run, measure, read, share_between_phases
from tests.processes import left_of

SIZE = workload.Size("tiny", 8, 16, 16, 512)
# Half of a generation on one GPU, and a tenth of what computes all tokens at once, stay: on two GPUs 3 s and 1.1 s.
ON_ONE = {"gen": 4.0, "old_log_prob": 2.0, "values": 2.0, "ref": 2.0, "update_critic": 2.0, "update_actor": 2.0}
ON_TWO = {"gen": 3.0, "old_log_prob": 1.1, "values": 1.1, "ref": 1.1, "update_critic": 1.1, "update_actor": 1.1}


def _run(
    folder: Path, name: str, phases: dict[str, float], step_s: float, sections: Mapping[str, Any] | None = None
) -> Result:
    """Write a finished run of five steps, the first three of which took long; `sections` are added to its layout."""
    run = folder / name / "run"
    run.mkdir(parents=True)
    job = workload.job(Path("/w"), SIZE, {**layout(name, 4), **(sections or {})}, 5, "CUDA")
    (folder / name / "job.yaml").write_text(yaml.safe_dump(job))
    (folder / name / "finished.json").write_text('{"started": 100.0}')
    rows = []
    trace = TraceWriter(run / "trace.json")
    for step in range(1, 6):
        slow = 10.0 if step <= 3 else 1.0
        timings = {f"timing_s/{phase}": seconds * slow for phase, seconds in phases.items()}
        comm = {"comm_mb/update_weights": 90.0, "comm_s/update_weights": 0.5, "comm_gb_per_s/update_weights": 0.09}
        comm |= {"pool/actor/memory_peak_gb": 20.0, "pool/critic/memory_peak_gb": 30.0}
        rows.append({"step": step, "time": 100.0 + 10 * step, "timing_s/step": step_s * slow, **timings, **comm})
        trace.record("data", pool="", role="data", start=10.0 * step, end=10.0 * step + 0.5, step=step)
        trace.record("gen", pool="actor", role="rollout", start=10.0 * step + 1, end=10.0 * step + 10, step=step)
    trace.close()
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return read(name, folder / name)


def test_a_run_is_its_medians_after_the_warm_up(tmp_path: Path) -> None:
    result = _run(tmp_path, "1+1", ON_ONE, 10.0)

    assert (result.step_s, result.first_step_s, len(result.steps)) == (10.0, 10.0, 2)
    assert result.phases() == ON_ONE
    # Generation, log-probs and update: 8 of the 10 seconds.
    assert result.step_over_longest_pool() == pytest.approx(10 / 8)
    assert result.replicas() == 1
    assert report.memory_peak(result) == 30.0
    assert report.sync_bandwidth(result) == 0.09, "of one replica, however many senders there are"
    assert result.between_phases == pytest.approx(0.05)


def test_tokens_per_second_are_of_all_steps_together() -> None:
    steps = [{"timing_s/step": 1.0, "perf/throughput": 400.0}, {"timing_s/step": 3.0, "perf/throughput": 200.0}]

    assert Run("1+1", 100.0, steps).tokens_per_s == 250.0
    assert Run("1+1", 100.0, [{"timing_s/step": 1.0}]).tokens_per_s is None


def test_a_finished_run_of_the_same_job_is_not_repeated(tmp_path: Path) -> None:
    result = _run(tmp_path, "1+1", ON_ONE, 10.0)
    job = yaml.safe_load((tmp_path / "1+1" / "job.yaml").read_text())

    assert measure("1+1", job, tmp_path / "1+1").steps == result.steps


def test_each_layout_predicts_the_others(tmp_path: Path) -> None:
    # On one pool of two GPUs everything runs one after the other: 8.5 s.
    results = [_run(tmp_path, "1+1", ON_ONE, 10.0), _run(tmp_path, "colocated-2", ON_TWO, 10.0)]

    found = {(one.source, one.target): one for one in predictions.predictions(results)}

    # Values and reference are longer than the log-probs: 4 + 2 + 2 + 2 s.
    assert found["1+1", "1+1"].predicted_s == pytest.approx(10.0)
    assert found["1+1", "colocated-2"].predicted_s == pytest.approx(8.5)
    assert found["colocated-2", "1+1"].predicted_s == pytest.approx(10.0)
    assert found["1+1", "colocated-2"].error == pytest.approx(-0.15)


def test_what_a_run_did_not_measure_it_does_not_predict(tmp_path: Path) -> None:
    with_model = {**ON_ONE, "reward_model": 1.0}
    results = [_run(tmp_path, "1+1", ON_ONE, 10.0), _run(tmp_path, "reward-alone", with_model, 10.0)]

    pairs = [(one.source, one.target) for one in predictions.predictions(results)]

    assert pairs == [("1+1", "1+1"), ("reward-alone", "1+1"), ("reward-alone", "reward-alone")]


def test_the_tables_have_every_layout_and_every_pair(tmp_path: Path) -> None:
    results = [_run(tmp_path, "1+1", ON_ONE, 10.0), _run(tmp_path, "2+1", ON_ONE, 9.0)]
    console = Console(width=150, record=True)

    console.print(report.table(results, SIZE, {8: 3.8}))
    console.print(predictions.table(predictions.predictions(results)))

    text = console.export_text()
    shown = ["1+1", "2+1", "gen: engine alone / ours", "0.95", "5.00%", "step / longest pool's own phases", "-10.0%"]
    assert [words for words in shown if words not in text] == []


def test_the_table_of_a_job_without_a_critic_has_the_floors_of_its_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(report, "floors", lambda _, size, gpus, __: asked.append((size.num_prompts, gpus)) or {})
    phases = {name: seconds for name, seconds in ON_ONE.items() if name not in ("values", "update_critic")}
    grpo = {
        "algorithm": {"advantageEstimator": "GRPO"},
        "rollout": {"samplesPerPrompt": 4},
        "data": {"trainBatchSize": 4},
        "actor": {"miniBatchSize": 2},
    }

    console = Console(width=150, record=True)
    console.print(report.table([_run(tmp_path, "colocated", phases, 10.0, grpo)], SIZE, {}))

    assert asked == [(16, {"actor": 4, "ref": 4, "rollout": 4})]
    assert "update_actor" in console.export_text()


def test_the_rate_of_the_weights_is_beside_that_of_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floor = sync_floor(workload.SHAPES["tiny"], SIZE, 450e9)
    monkeypatch.setattr(report, "floors", lambda *_: {"update_weights": floor})
    console = Console(width=150, record=True)

    console.print(report.table([_run(tmp_path, "1+1", ON_ONE, 10.0)], SIZE, {}))

    assert "0.09 (of 450)" in console.export_text()


def test_time_in_which_no_phase_runs_is_between_phases() -> None:
    spans = [
        Span("data", "", "data", 1, 0.0, 9.0),
        Span("data", "", "data", 2, 10.0, 11.0),
        Span("gen", "a", "rollout", 2, 11.0, 15.0),
        Span("values", "c", "critic", 2, 14.0, 19.0),
        Span("data", "", "data", 3, 20.0, 21.0),
        # Of a checkpoint after the last step.
        Span("data", "", "data", 3, 40.0, 41.0),
    ]

    assert share_between_phases(spans, 2) == pytest.approx(0.1)
    assert share_between_phases(spans, 3) is None


# Writes a step every 50 ms, starts another process, and never ends.
ENDLESS = """
import json, pathlib, subprocess, sys, time
run = pathlib.Path(sys.argv[-1])
run.mkdir()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(run / "child").write_text(str(child.pid))
(run / "trace.json").write_text("[]")
for step in range(1, 10_000):
    row = {"step": step, "time": time.time(), "timing_s/step": 0.05}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")
    time.sleep(0.05)
"""


def test_a_run_is_killed_after_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_run, "PROGRAM", ENDLESS)
    job = workload.job(Path("/w"), SIZE, layout("colocated", 2), 5, "CUDA")

    result = measure("colocated", job, tmp_path / "colocated", stop_after=5)

    assert len(result.steps) >= 2
    child = int((tmp_path / "colocated" / "run" / "child").read_text())
    assert left_of([child], limit_s=60) == []


def test_a_run_that_ends_before_its_last_step_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_run, "PROGRAM", "raise SystemExit('no memory')")
    job = workload.job(Path("/w"), SIZE, layout("colocated", 2), 5, "CUDA")
    with pytest.raises(RuntimeError, match=r"layout colocated ended with 1: see (.|\n)*no memory"):
        measure("colocated", job, tmp_path / "colocated", stop_after=5)


def test_a_line_that_is_being_written_is_no_step_yet(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "time": 1}\n{"step": 4, "ti')

    assert list(whole_run.steps_of(tmp_path)) == [3]
    assert whole_run.steps_of(tmp_path / "nothing") == {}
