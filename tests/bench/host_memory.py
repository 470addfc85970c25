"""The memory of this machine, sampled while a run goes on. Called by `bench_host_memory`.

Two tables, written as they grow: `memory.csv` has a row for each second, of /proc/meminfo and of the process group's
limit; `processes.csv` has a row for each process of more than `LEAST_BYTES`. PSS divides shared pages by those who
share them, and takes long to read, so only every `PSS_EVERY`-th row has it.
"""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from ppojob_trainer.telemetry.trace import Span

LEAST_BYTES: Final = 100 * 10**6
PSS_EVERY: Final = 15
_FIELDS: Final = (
    "MemTotal",
    "MemAvailable",
    "MemFree",
    "Cached",
    "Dirty",
    "Writeback",
    "Shmem",
    "AnonPages",
    "Mlocked",
)
_LIMITED: Final = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True)
class Peak:
    """The most that was used in a phase, in bytes: MemTotal less MemAvailable, as Ray's memory monitor counts."""

    phase: str
    used: int
    at: float


@contextmanager
def sampled(folder: Path, period_s: float = 1.0) -> Iterator[None]:
    """Write both tables meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    is_over = threading.Event()
    thread = threading.Thread(target=_sample, args=(folder, period_s, is_over), name="host memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(60)


def peaks(folder: Path, spans: Sequence[Span]) -> list[Peak]:
    """Return the peak of each phase in the order of their beginnings; what is outside of all phases is `no phase`."""
    found: dict[str, Peak] = {}
    for row in _rows(folder / "memory.csv"):
        at, used = float(row["time"]), int(row["MemTotal"]) - int(row["MemAvailable"])
        for phase in phases_at(at, spans) or ["no phase"]:
            known = found.get(phase)
            if known is None or used > known.used:
                found[phase] = Peak(phase, used, at)
    return list(found.values())


def total(folder: Path) -> int:
    """Return the machine's memory in bytes."""
    return int(_rows(folder / "memory.csv")[0]["MemTotal"])


def phases_at(at: float, spans: Sequence[Span]) -> list[str]:
    """Return the phases that run at a time, as `step 3 save_checkpoint`."""
    return sorted({f"step {span.step} {span.name}" for span in spans if span.start <= at <= span.end})


def largest(folder: Path, at: float) -> list[tuple[str, int]]:
    """Return the processes at about a time and their resident bytes, the largest first."""
    rows = [row for row in _rows(folder / "processes.csv") if abs(float(row["time"]) - at) < 1.0]
    found = {(row["pid"], row["name"]): int(row["rss"]) for row in rows}
    return sorted(((name, rss) for (_, name), rss in found.items()), key=lambda one: -one[1])


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def _sample(folder: Path, period_s: float, is_over: threading.Event) -> None:
    with (
        (folder / "memory.csv").open("w", encoding="utf-8", newline="") as memory,
        (folder / "processes.csv").open("w", encoding="utf-8", newline="") as processes,
    ):
        host, each = csv.writer(memory), csv.writer(processes)
        host.writerow(["time", *_FIELDS, "cgroup"])
        each.writerow(["time", "pid", "name", "rss", "pss"])
        number = 0
        while True:
            now = time.time()
            host.writerow([f"{now:.1f}", *_meminfo(), _cgroup()])
            each.writerows([f"{now:.1f}", *row] for row in _processes(with_pss=number % PSS_EVERY == 0))
            memory.flush()
            processes.flush()
            number += 1
            if is_over.wait(period_s):
                return


def _meminfo() -> list[int]:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return [found.get(name, 0) for name in _FIELDS]


def _cgroup() -> str:
    return _LIMITED.read_text(encoding="ascii").strip() if _LIMITED.exists() else ""


def _processes(*, with_pss: bool) -> Iterator[tuple[int, str, int, int | str]]:
    for process in psutil.process_iter():
        try:
            rss = process.memory_info().rss
            if rss >= LEAST_BYTES:
                pss = process.memory_full_info().pss if with_pss else ""
                yield process.pid, " ".join(process.cmdline())[:60], rss, pss
        except psutil.Error:
            # It has ended meanwhile.
            continue
