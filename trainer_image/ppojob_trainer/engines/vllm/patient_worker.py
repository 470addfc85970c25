"""vLLM's worker on a GPU, which waits for those who load their models there before it looks how much memory is free.

vLLM names it by `worker_cls` and makes it in the engine's own processes, tens of seconds after they were started: until
then they load libraries. Whoever started them says by a file that the GPU is free; see `RolloutEngine.let_measure`.
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
        """Wait for the file, for as long as the engine has to start, then go on as vLLM does."""
        file = Path(os.environ[MAY_MEASURE])
        # Whoever waits for this process ends it when it takes too long.
        while not file.exists():
            time.sleep(_POLL_S)
        super().init_device()
