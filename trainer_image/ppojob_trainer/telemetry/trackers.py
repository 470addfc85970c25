"""The services in `spec.telemetry.trackers`: the check that their packages are installed, and their sinks.

`main` calls it before anything is loaded. Addresses and keys are the services' own environment variables.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.telemetry import Tracker
from ppojob_trainer.telemetry.sinks.background import BackgroundSink
from ppojob_trainer.telemetry.sinks.sink import MetricSink

__all__ = ["TrackedRun", "TrackerMissingError", "check_installed", "open_trackers"]

_PACKAGES = {Tracker.WANDB: "wandb", Tracker.MLFLOW: "mlflow"}


class TrackerMissingError(RuntimeError):
    """A tracker's package is not installed."""


@dataclass(frozen=True)
class TrackedRun:
    """The information about the run that a service receives.

    project: W&B's project, MLflow's experiment. uid: the object's; all attempts of a job are one run there.
    config: the resolved spec. folder: where a service may write.
    """

    project: str
    name: str
    uid: str
    config: Mapping[str, Any]
    folder: Path


def check_installed(trackers: Sequence[Tracker]) -> None:
    """Check that the packages are installed, without importing them.

    Raises:
        TrackerMissingError: names the tracker and the package.
    """
    for tracker in trackers:
        package = _PACKAGES[tracker]
        if importlib.util.find_spec(package) is None:
            raise TrackerMissingError(
                f"telemetry.trackers asks for {tracker.value}, and the package {package} is not installed: add it to "
                f"the image (pip install {package}), or remove {tracker.value}"
            )


def open_trackers(trackers: Sequence[Tracker], run: TrackedRun) -> list[MetricSink]:
    """Return a sink for each service, each with a thread that connects to the service, so that none delays a run."""
    return [BackgroundSink(_sink(tracker, run)) for tracker in dict.fromkeys(trackers)]


def _sink(tracker: Tracker, run: TrackedRun) -> MetricSink:
    if tracker is Tracker.WANDB:
        from ppojob_trainer.telemetry.sinks.wandb import WandBSink

        return WandBSink(run.project, run.name, run.uid, run.config, run.folder)
    from ppojob_trainer.telemetry.sinks.mlflow import MLflowSink

    return MLflowSink(run.project, run.name, run.uid, run.config, run.folder)
