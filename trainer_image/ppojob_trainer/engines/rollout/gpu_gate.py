"""Lets vLLM's workers wait until the other roles have loaded their models onto the GPU that they share.

vLLM allocates its share of the GPU's whole memory, and refuses to start if less is free. `waiting_worker` waits for the
file of the gate in vLLM's processes, which start tens of seconds earlier, because they first import libraries.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from pathlib import Path

from vllm import AsyncEngineArgs

from ppojob_trainer.engines.rollout.options import GPU_FREE_FILE, GPU_WORKER, OWNER


class GpuGate:
    """See the module's docstring. It is closed until `open`."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory(prefix="ppojob-rollout-")
        self._lock = threading.Lock()

    @property
    def _file(self) -> Path:
        return Path(self._folder.name) / "gpu-is-free"

    def hold(self, arguments: AsyncEngineArgs) -> None:
        """Have the workers wait that this process starts with these arguments."""
        os.environ |= {GPU_FREE_FILE: str(self._file), OWNER: str(os.getpid())}
        arguments.worker_cls = GPU_WORKER

    def open(self) -> None:
        """Let the workers continue."""
        # FileNotFoundError: it was removed, because no worker waits any more.
        with self._lock, contextlib.suppress(FileNotFoundError):
            self._file.touch()

    def remove(self) -> None:
        """Remove the file, when no worker waits any more."""
        with self._lock:
            self._folder.cleanup()
