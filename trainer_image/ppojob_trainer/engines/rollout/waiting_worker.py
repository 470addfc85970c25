"""vLLM's GPU worker, but it waits until the other roles have loaded their models before it measures the free memory.

`RolloutEngine.start` gives vLLM the name of this class as `worker_cls`. vLLM's processes create it tens of seconds
after their start, because they first import libraries. `RolloutEngine.signal_gpu_free` creates the file that ends the
wait.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from vllm.v1.worker.gpu_worker import Worker

from ppojob_trainer.engines.rollout.options import GPU_FREE_FILE, OWNER
from ppojob_trainer.engines.rollout.owner import end_with

_POLL_S: Final = 0.02


class WaitingWorker(Worker):
    """See the module's docstring."""

    def init_device(self) -> None:
        """Wait for the file, at most until the engine's start times out, then continue as vLLM does."""
        file = Path(os.environ[GPU_FREE_FILE])
        # Without a limit here: the owner terminates this process after its own time limit, unless it is killed before.
        end_with(int(os.environ[OWNER]))
        while not file.exists():
            time.sleep(_POLL_S)
        super().init_device()
