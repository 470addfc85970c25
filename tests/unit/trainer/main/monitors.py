"""A monitor whose reports go to an operator that is a fake."""

import asyncio
import threading
from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.progress import ProgressReply, ProgressReport
from ppojob_api.v1alpha1.resolve import JobFile, Reporting, resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.main.monitor import Monitor
from ppojob_trainer.telemetry import RunFiles

RAW: dict[str, Any] = {
    "image": "i",
    "model": {"actor": {"path": "/m"}},
    "data": {"train": {"reasoningGym": {"task": "products"}}, "trainBatchSize": 256},
    "reward": {"function": {"module": "r"}},
    "pools": [{"name": "actor", "gpusPerNode": 4}, {"name": "critic", "gpusPerNode": 2}],
    "placement": {"actor": "actor", "critic": "critic"},
    "storage": {"claimName": "c"},
    "trainer": {"totalSteps": 5},
}


class FakeReporter:
    """The operator at the other end of the line."""

    def __init__(self, reporting: Reporting) -> None:
        self.fenced_out = threading.Event()
        self.is_job_deleted = False
        self.is_closed = False
        self.reply = ProgressReply()
        self.reports: list[ProgressReport] = []
        self.was_urgent = False

    def start(self) -> None:
        pass

    def update(self, report: ProgressReport, *, now: bool = False) -> None:
        self.reports.append(report)
        self.was_urgent = now

    def close(self) -> bool:
        self.is_closed = True
        return True


def monitor_of(root: Path, stop: threading.Event) -> Monitor:
    job = JobFile(
        namespace="n",
        name="x",
        uid="u",
        root=str(root),
        spec=resolve(parse_spec(RAW)),
        reporting=Reporting(url="https://operator"),
    )
    return Monitor(job, 0, RunFiles(root), stop)


async def watched(monitor: Monitor, until: Any, timeout_s: float = 120.0) -> None:
    """Run the watch until it has seen what it should."""
    watch = asyncio.create_task(monitor.watch())
    try:
        async with asyncio.timeout(timeout_s):
            while not until() and not watch.done():
                await asyncio.sleep(0.01)
        if watch.done():
            watch.result()
    finally:
        watch.cancel()
