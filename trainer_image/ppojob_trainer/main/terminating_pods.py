"""Detects that a pod of the run's RayCluster is being deleted: the pod's hook (`ppojob hold`) writes a file to storage.

Called by `monitor.py`. It polls from a thread, because storage that hangs must not stop the run. An error of the
storage counts as "no pod is being deleted": the run continues, and the operator can still request a stop.
"""

import asyncio
import logging
from pathlib import Path

from ppojob_trainer.telemetry import RunFiles

logger = logging.getLogger(__name__)

_POLL_S = 1.0


class TerminatingPods:
    """The file that the hook writes, and the files by which the driver acknowledges it and says that it has ended."""

    def __init__(self, files: RunFiles, cluster: str | None) -> None:
        """`cluster` is the RayCluster's name. None: the run is in no RayCluster, and nothing is ever detected."""
        self._request = files.terminating(cluster) if cluster else None
        self._acknowledgement = files.stop_acknowledged(cluster) if cluster else None
        self._end = files.run_ended(cluster) if cluster else None

    def forget(self) -> None:
        """Delete the files of an earlier attempt in the same RayCluster."""
        for path in (self._request, self._acknowledgement, self._end):
            if path is not None:
                _tried(path, "unlink")

    def note_end(self) -> None:
        """Let the hooks of pods end that have only processes which are left to the next attempt."""
        if self._end is not None:
            _tried(self._end, "touch")

    async def detected(self) -> None:
        """Return as soon as a pod is being deleted, after acknowledging it to the hook."""
        while not await asyncio.to_thread(self._poll):
            await asyncio.sleep(_POLL_S)

    def _poll(self) -> bool:
        if self._request is None or self._acknowledgement is None or not _tried(self._request, "stat"):
            return False
        _tried(self._acknowledgement, "touch")
        return True


def _tried(path: Path, what: str) -> bool:
    """Return whether the operation on the storage succeeded."""
    try:
        getattr(path, what)()
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("%s: %s", path, error.strerror)
        return False
    return True
