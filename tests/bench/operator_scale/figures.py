"""Numbers of processes and of samples: percentiles, memory, processor time. The bench and the fleet use it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_KIB_PER_MIB = 1024


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` (0 to 1) of the values do not exceed; nan if there are none."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def resident_mib(pid: int, field: str = "VmRSS") -> float:
    """Return a process' resident memory (VmRSS), or its highest so far (VmHWM)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = next(line.split() for line in lines if line.startswith(f"{field}:"))
    return int(words[1]) / _KIB_PER_MIB


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in user and kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@dataclass(frozen=True)
class Usage:
    """What processes used between two moments, by name."""

    seconds: float
    processor: dict[str, float]

    def cores(self, name: str) -> float:
        """Return how many cores a process kept busy."""
        return self.processor[name] / self.seconds


class Meter:
    """Reads the processor time of processes at two moments."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._at_first = {name: processor_seconds(pid) for name, pid in pids.items()}

    def read(self) -> Usage:
        """Return what was used since this meter was made."""
        used = {name: processor_seconds(pid) - self._at_first[name] for name, pid in self._pids.items()}
        return Usage(time.monotonic() - self._began, used)
