"""vLLM's GPU worker, which waits until the other roles have loaded their models before it measures the free memory.

vLLM gets its name in `worker_cls` and creates it in the engine's processes, tens of seconds after their start: until
then they import libraries. The replica's process creates a file when the GPU is free (`RolloutEngine.let_measure`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from vllm.v1.worker.gpu_worker import Worker

from ppojob_trainer.engines.vllm.options import MAY_MEASURE

_POLL_S: Final = 0.02


class PatientWorker(Worker):
    """See the module's docstring."""

    def init_device(self) -> None:
        """Wait for the file, at most until the engine's start times out, then continue as vLLM does."""
        file = Path(os.environ[MAY_MEASURE])
        # No limit here: the process that waits for this one terminates it when it takes too long.
        while not file.exists():
            time.sleep(_POLL_S)
        super().init_device()
