"""MLflow: one run for all attempts of a job, found again by its tag. `MLFLOW_TRACKING_URI` and the credentials come
from the environment; without an address the records go to `mlflow.db` in the job's folder.

The package is loaded at the first write, in the thread of `BackgroundSink`, which is the only one that calls this.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppojob_trainer.telemetry.sinks.sink import Metrics

UID_TAG = "ppojob.uid"
_FOREIGN = re.compile(r"[^\w\-./ ]")
_MAX_METRICS, _MAX_PARAMETERS = 1000, 100
"""Of one request, as MLflow's REST API has it."""
_MAX_VALUE = 500


class MLflowSink:
    """Logs each step into a run of the experiment."""

    def __init__(self, experiment: str, name: str, uid: str, config: Mapping[str, Any], folder: Path) -> None:
        self._experiment = experiment
        self._name = name
        self._uid = uid
        self._config = config
        self._folder = folder
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""

    def write(self, step: int, time: float, metrics: Metrics) -> None:
        """Log the metrics of one step; a name's characters that MLflow refuses become `_`."""
        if self._client is None:
            self._open()
        milliseconds = round(time * 1000)
        found = [
            self._entities.Metric(_FOREIGN.sub("_", name), float(value), milliseconds, step)
            for name, value in metrics.items()
            # Some of its databases take no NaN.
            if math.isfinite(value)
        ]
        for start in range(0, len(found), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=found[start : start + _MAX_METRICS])

    def close(self) -> None:
        """Mark the run as finished."""
        if self._client is not None:
            self._client.set_terminated(self._run_id)

    def _open(self) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self._folder / 'mlflow.db'}"
        client = mlflow.MlflowClient(tracking_uri=address)
        experiment = client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        before = client.search_runs([number], filter_string=f"tags.`{UID_TAG}` = '{self._uid}'", max_results=1)
        if before:
            self._run_id = before[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            run = client.create_run(number, run_name=self._name, tags={UID_TAG: self._uid})
            self._run_id = run.info.run_id
            parameters = [self._entities.Param(name, value) for name, value in _flat(self._config)]
            for start in range(0, len(parameters), _MAX_PARAMETERS):
                client.log_batch(self._run_id, params=parameters[start : start + _MAX_PARAMETERS])
        self._client = client


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield `actor.learningRate` and its value, cut to what MLflow takes."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield _FOREIGN.sub("_", f"{prefix}{name}"), str(value)[:_MAX_VALUE]
