"""The surroundings of a run without processes: checkpoints that are kept in memory, a monitor that remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.progress import Activity, LiveSettings
from ppojob_trainer.controller.monitor_port import Uploaded
from ppojob_trainer.controller.ports import Metrics
from ppojob_trainer.controller.storage_ports import Restored
from tests.unit.trainer.controller.fake_world import FakeBatch, World


class FakeCheckpoints:
    """Keeps the models of each saved step."""

    def __init__(self, world: World, found: Restored[FakeBatch] | None = None) -> None:
        self.world = world
        self.found = found
        self.batches: dict[int, Sequence[FakeBatch]] = {}
        self.staged: dict[int, tuple[float, float]] = {}
        self.saved: dict[int, tuple[Mapping[str, Any], float, float]] = {}
        self.in_background: list[int] = []

    async def restore(self) -> Restored[FakeBatch] | None:
        return self.found

    async def stage(self, step: int, *, in_background: bool, batches: Sequence[FakeBatch]) -> None:
        await self.world.phase("save", step)
        self.batches[step] = batches
        if in_background:
            self.in_background.append(step)
        self.staged[step] = (self.world.actor, self.world.critic)

    async def commit(self, step: int, state: Mapping[str, Any], keep: int) -> str:
        # Only a save in the background takes its time here.
        if "write" in self.world.durations:
            await self.world.phase("write", step)
        self.saved[step] = (state, *self.staged[step])
        return f"step-{step}"


class FakeExports:
    """Remembers what was exported; an upload takes the time of the phase `upload`."""

    def __init__(self, world: World, left: tuple[int, ...] = ()) -> None:
        self.world = world
        self.left = left
        self.results: list[Uploaded] = []
        """How the next uploads end; after that: well."""
        self.num_exports = 0

    async def export(self, step: int, keep: int) -> Path:
        await self.world.phase("export")
        self.num_exports += 1
        return Path("model")

    def newest(self, step: int) -> int | None:
        return max((left for left in self.left if left <= step), default=None)

    async def upload(self, step: int) -> Uploaded:
        await self.world.phase("upload", step)
        return self.results.pop(0) if self.results else Uploaded(f"s3://bucket/step-{step}")


class FakeMonitor:
    """Records its calls; `stop_at` names the phase at whose start the run is asked to stop."""

    def __init__(self, settings: LiveSettings) -> None:
        self.settings = settings
        self.stopping = asyncio.Event()
        self.records: dict[int, dict[str, float]] = {}
        self.activities: list[Activity] = []
        self.resumed_step: int | None = None
        self.saved_steps: list[int] = []
        self.checkpoint_request: str | None = None
        self.answers: list[str | None] = []
        self.exports: list[Path] = []
        self.uploads: list[Uploaded] = []

    @property
    def total_steps(self) -> int:
        return self.settings.steps(steps_per_epoch=0)

    @property
    def is_stopping(self) -> bool:
        return self.stopping.is_set()

    async def wait_for_stop(self) -> None:
        await self.stopping.wait()

    def set_activity(self, activity: Activity) -> None:
        self.activities.append(activity)

    def resumed(self, step: int) -> None:
        self.resumed_step = step

    def record(self, step: int, metrics: Metrics) -> None:
        self.records[step] = dict(metrics)

    def saved(self, step: int, location: str, request: str | None) -> None:
        self.saved_steps.append(step)
        self.answers.append(request)

    def exported(self, path: Path) -> None:
        self.exports.append(path)

    def uploaded(self, result: Uploaded) -> None:
        self.uploads.append(result)
