"""Sees that a pod of the run's RayCluster is being deleted: its hook (`ppojob hold`) leaves a file in the storage.

`monitor.py` asks it. It looks from a thread, because a storage that hangs must not stop the run, and what the storage
refuses it takes for "no pod is leaving": the run goes on, and the operator can ask for a stop too.
"""

import asyncio
import logging
from pathlib import Path

from ppojob_trainer.telemetry import RunFiles

logger = logging.getLogger(__name__)

_POLL_S = 1.0


class LeavingPods:
    """The file of the hook, and the one by which the hook knows that it was heard."""

    def __init__(self, files: RunFiles, cluster: str | None) -> None:
        """`cluster` is the RayCluster's name; None: the run is in none, and no pod ever leaves."""
        self._sign = files.leaving(cluster) if cluster else None
        self._heard = files.heard(cluster) if cluster else None

    def forget(self) -> None:
        """Take away what an earlier attempt in the same RayCluster was told: its pods are gone."""
        for path in (self._sign, self._heard):
            if path is not None:
                _tried(path, "unlink")

    async def seen(self) -> None:
        """Return as soon as a pod is leaving, and let its hook know."""
        while not await asyncio.to_thread(self._look):
            await asyncio.sleep(_POLL_S)

    def _look(self) -> bool:
        if self._sign is None or self._heard is None or not _tried(self._sign, "stat"):
            return False
        _tried(self._heard, "touch")
        return True


def _tried(path: Path, what: str) -> bool:
    """Return whether the storage did it."""
    try:
        getattr(path, what)()
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("%s: %s", path, error.strerror)
        return False
    return True
