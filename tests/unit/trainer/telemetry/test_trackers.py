"""W&B and MLflow: one run for all attempts, nothing that a step waits for, a sentence where the package is missing.

The services' own packages are not among the requirements. Where they are installed the tests use them, W&B offline and
MLflow with a database in a folder; the rest uses a client that notes its calls.
"""

import importlib.util
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.telemetry import Tracker
from ppojob_trainer.telemetry import TrackedRun, TrackerMissingError, check_installed, open_trackers
from ppojob_trainer.telemetry.sinks.background import BackgroundSink
from ppojob_trainer.telemetry.sinks.mlflow import MLflowSink
from ppojob_trainer.telemetry.sinks.wandb import WandBSink

CONFIG = {"actor": {"learningRate": 1e-6}, "pools": [{"name": "a"}], "empty": {}}
METRICS = {"critic/score/mean": 0.5, "val-core/products/score/mean@1": 0.25, "actor/grad_norm": float("nan")}


def _tracked(folder: Path) -> TrackedRun:
    return TrackedRun("project", "n-x", "uid-1", CONFIG, folder)


@pytest.mark.parametrize(("tracker", "package"), [(Tracker.WANDB, "wandb"), (Tracker.MLFLOW, "mlflow")])
def test_a_missing_package_is_named(tracker: Tracker, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(TrackerMissingError, match=rf"asks for {tracker.value}, and the package {package} is not"):
        check_installed([tracker])


def test_no_tracker_needs_no_package() -> None:
    check_installed([])


class _Recorder:
    """A sink that notes what it is given, once it is let."""

    def __init__(self, *, fails: bool = False) -> None:
        self.steps: list[int] = []
        self.may_go = threading.Event()
        self.is_closed = False
        self._fails = fails

    def write(self, step: int, time: float, metrics: Any) -> None:
        self.may_go.wait(600)
        if self._fails:
            raise ConnectionError("the service is away")
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def test_no_step_waits_for_a_service() -> None:
    recorder = _Recorder()
    sink = BackgroundSink(recorder)
    for step in (1, 2, 3):
        sink.write(step, 0.0, {})
    assert recorder.steps == []
    recorder.may_go.set()

    sink.close()

    assert (recorder.steps, recorder.is_closed) == ([1, 2, 3], True)


def test_an_unavailable_service_is_reported_at_a_later_step() -> None:
    recorder = _Recorder(fails=True)
    recorder.may_go.set()
    sink = BackgroundSink(recorder)
    sink.write(1, 0.0, {})

    with pytest.raises(RuntimeError, match="_Recorder: ConnectionError: the service is away"):
        sink.close()
    assert recorder.is_closed


def test_a_service_that_takes_nothing_does_not_keep_the_run_from_ending() -> None:
    recorder = _Recorder()
    sink = BackgroundSink(recorder, close_timeout_s=0.1)
    sink.write(1, 0.0, {})

    with pytest.raises(RuntimeError, match="did not arrive in time"):
        sink.close()
    recorder.may_go.set()


def test_wandb_gets_the_steps_of_all_attempts_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Run:
        def __getattr__(self, name: str) -> Any:
            return lambda *arguments, **options: calls.append((name, arguments or options))

    def init(**options: Any) -> Run:
        calls.append(("init", options))
        return Run()

    monkeypatch.setitem(__import__("sys").modules, "wandb", types.SimpleNamespace(init=init))
    sink = WandBSink("project", "n-x", "uid-1", CONFIG, tmp_path)
    sink.write(5, 0.0, {"critic/score/mean": 0.5})
    sink.close()

    name, options = calls[0]
    assert name == "init"
    assert (options["id"], options["resume"], options["project"]) == ("uid-1", "allow", "project")
    assert ("log", ({"critic/score/mean": 0.5, "training/global_step": 5},)) in calls
    assert calls[-1][0] == "finish"


def test_nothing_is_opened_for_a_run_that_logs_nothing(tmp_path: Path) -> None:
    # Neither package is loaded, or this would fail where it is not installed.
    for sink in open_trackers([Tracker.WANDB, Tracker.MLFLOW, Tracker.WANDB], _tracked(tmp_path)):
        sink.close()


def test_wandb_itself_takes_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):
        sink = WandBSink("project", "n-x", "uid-1", CONFIG, tmp_path)
        sink.write(step, 0.0, METRICS)
        sink.close()

    assert len(list((tmp_path / "wandb").glob("offline-run-*-uid-1"))) >= 1


def test_mlflow_itself_has_one_run_for_two_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for step in (1, 2):
        sink = MLflowSink("project", "n-x", "uid-1", CONFIG, tmp_path)
        sink.write(step, 1000.0 + step, METRICS)
        sink.close()

    client = mlflow.MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "n-x"
    assert run.info.status == "FINISHED"
    assert run.data.params["actor.learningRate"] == "1e-06"
    assert run.data.metrics == {"critic/score/mean": 0.5, "val-core/products/score/mean_1": 0.25}
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [(point.step, point.timestamp) for point in history] == [(1, 1_001_000), (2, 1_002_000)]
