"""The interfaces of the job's storage, as Protocols: checkpoints and exports. See `ports`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol

from ppojob_trainer.controller.monitor_port import Uploaded
from ppojob_trainer.controller.ports import B


@dataclass(frozen=True)
class Restored(Generic[B]):
    """The checkpoint that a run resumes from: its step, the `state` of `commit`, the `batches` of `stage`."""

    step: int
    state: Mapping[str, Any]
    batches: Sequence[B] = ()


class CheckpointPort(Protocol[B]):
    """Saves the state of the models and of the run in the storage."""

    async def restore(self) -> Restored[B] | None:
        """Load the checkpoint to resume from into the models; None if there is no checkpoint."""
        ...

    async def stage(self, step: int, *, in_background: bool, batches: Sequence[B]) -> None:
        """Save the current models into a new checkpoint. They may change after this returns.

        Args:
            batches: to be saved with them.
            in_background: return before everything is written; `commit` waits for the rest.
        """
        ...

    async def commit(self, step: int, state: Mapping[str, Any], keep: int) -> str:
        """Wait until the checkpoint is written, add the run's `state`, and make it the newest. Return its location."""
        ...


class ExportPort(Protocol):
    """Exports the policy as a HuggingFace folder, and uploads it."""

    async def export(self, step: int, keep: int) -> Path:
        """Write the policy after `step` to the storage; return the folder's path.

        Args:
            keep: how many exports are kept, if the job exports several steps.
        """
        ...

    def newest(self, step: int) -> int | None:
        """Return the newest exported step up to `step`, whose upload an earlier attempt may have dropped; None: none.

        A job with one export makes it again.
        """
        ...

    async def upload(self, step: int) -> Uploaded:
        """Upload the export of `step`. An upload that failed is a result, no error."""
        ...


@dataclass(frozen=True)
class Storage(Generic[B]):
    """What a run leaves behind."""

    checkpoints: CheckpointPort[B]
    exports: ExportPort
