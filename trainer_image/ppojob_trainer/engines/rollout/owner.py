"""Ends vLLM's processes when the process that started them is gone.

vLLM's core does not notice that its parent was killed. In a pod that is used again, it would keep its memory, and the
engine of the next attempt could not start. Each vLLM worker calls it: `waiting_worker` before it waits for the GPU, and
`worker_extension` once the engine runs. With several workers, the core is their parent, and the others end with it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Final

import psutil  # type: ignore[import-untyped]

_POLL_S: Final = 0.5


def end_with(owner: int) -> None:
    """Watch the process with the number `owner` in a thread; end this process, and vLLM's core, when it is gone."""
    watched = psutil.Process(owner)
    threading.Thread(target=_watch, args=(watched, os.getppid()), name="owner", daemon=True).start()


def _watch(owner: psutil.Process, parent: int) -> None:
    while _runs(owner):
        time.sleep(_POLL_S)
    if os.getppid() == parent != owner.pid:
        # The core of an engine with several workers.
        os.kill(parent, signal.SIGKILL)
    os._exit(1)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
