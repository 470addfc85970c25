"""Weights & Biases: one run for all attempts of a job. `WANDB_API_KEY`, `WANDB_BASE_URL`, `WANDB_MODE` and the like
come from the environment.

The package is loaded at the first write, in the thread of `BackgroundSink`, which is the only one that calls this.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppojob_trainer.telemetry.sinks.sink import Metrics

_STEP = "training/global_step"


class WandBSink:
    """Logs each step into a run whose id is the job's uid."""

    def __init__(self, project: str, name: str, uid: str, config: Mapping[str, Any], folder: Path) -> None:
        self._begin = {"project": project, "name": name, "id": uid, "config": dict(config), "dir": str(folder)}
        self._run: Any = None

    def write(self, step: int, time: float, metrics: Metrics) -> None:
        """Log the metrics of one step."""
        if self._run is None:
            self._run = self._open()
        # Not as W&B's own step, which may never go back: a resumed run repeats the steps after its checkpoint.
        self._run.log({**metrics, _STEP: step})

    def close(self) -> None:
        """Send the remaining values and finish the run."""
        if self._run is not None:
            self._run.finish()

    def _open(self) -> Any:
        wandb: Any = importlib.import_module("wandb")
        run = wandb.init(resume="allow", **self._begin)
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP)
        return run
