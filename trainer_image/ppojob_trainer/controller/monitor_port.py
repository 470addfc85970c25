"""The interface by which the loop reports the run and learns what is requested of it. `main.monitor` implements it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ppojob_api.v1alpha1.progress import Activity, LiveSettings
from ppojob_api.v1alpha1.reported import UploadFailure
from ppojob_trainer.controller.ports import Metrics


@dataclass(frozen=True)
class Uploaded:
    """The result of an upload: the address of the complete export, or why there is none."""

    address: str | None
    failure: UploadFailure | None = None


class MonitorPort(Protocol):
    """Receives what the run reports, and provides live settings, checkpoint requests and stop requests."""

    @property
    def settings(self) -> LiveSettings:
        """The latest values of the settings that may change while the job runs."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of the run, by the latest settings; read once the data is loaded."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether a graceful stop was requested."""
        ...

    @property
    def checkpoint_request(self) -> str | None:
        """The last checkpoint request, kept until its answer was acknowledged; None if there is no request."""
        ...

    async def wait_for_stop(self) -> None:
        """Return when a stop is requested."""
        ...

    def set_activity(self, activity: Activity) -> None:
        """Report the current activity of the run."""
        ...

    def resumed(self, step: int) -> None:
        """Report that the run resumes after `step`."""
        ...

    def record(self, step: int, metrics: Metrics) -> None:
        """Report the metrics of a finished step; step 0 is the validation before training."""
        ...

    def saved(self, step: int, location: str, request: str | None) -> None:
        """Report a saved checkpoint, and the last request received before it was written."""
        ...

    def exported(self, path: Path) -> None:
        """Report where the policy was exported."""
        ...

    def uploaded(self, result: Uploaded) -> None:
        """Report how an upload ended."""
        ...
