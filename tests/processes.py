"""Waiting for the end of processes that are not children of this one."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TypeVar

import psutil  # type: ignore[import-untyped]

Process = TypeVar("Process", int, psutil.Process)


def left_of(processes: Collection[Process], limit_s: float) -> list[Process]:
    """Return those that still run after a while, given by their numbers or as processes.

    One that has ended does not, even if its parent has not noticed.
    """
    end = time.monotonic() + limit_s
    while (left := [process for process in processes if _runs(process)]) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def _runs(process: int | psutil.Process) -> bool:
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
