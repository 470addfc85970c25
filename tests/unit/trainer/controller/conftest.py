"""A run of the controller over fake ports, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from ppojob_api.v1alpha1.progress import LiveSettings
from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.controller.loop import LoopSettings, Outcome, TrainingLoop
from ppojob_trainer.controller.phases import Phases
from ppojob_trainer.controller.ppo import PPO, PPOSettings
from ppojob_trainer.controller.schedule import Schedule, schedule_of
from ppojob_trainer.controller.storage_ports import Restored, Storage
from ppojob_trainer.maths.kl import AdaptiveKLController
from tests.unit.trainer.controller.fake_ports import fake_ports
from tests.unit.trainer.controller.fake_surroundings import FakeCheckpoints, FakeExports, FakeMonitor
from tests.unit.trainer.controller.fake_world import NUM_ROWS, FakeBatch, World

SPLIT = {"data": "a", "actor": "a", "rollout": "a", "critic": "c", "ref": "c", "reward": "c", "reward_model": "c"}


@dataclass
class Run:
    """Everything that a test looks at."""

    world: World
    monitor: FakeMonitor
    checkpoints: FakeCheckpoints
    exports: FakeExports
    loop: TrainingLoop[FakeBatch]
    ppo: PPO[FakeBatch]

    async def __call__(self) -> Outcome:
        return await self.world.time.run(self.loop.run())


@dataclass(frozen=True)
class Exporting:
    """What a run exports: each checkpoint or the last; seconds of an upload (None: none); steps left by an attempt."""

    is_each: bool = False
    upload_s: float | None = None
    left: tuple[int, ...] = ()


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run() -> MakeRun:
    """Return a factory of runs."""

    def make(
        mode: ScheduleMode | Schedule = ScheduleMode.OVERLAPPED,
        *,
        steps: int = 3,
        validate_every: int = 0,
        save_every: int = 0,
        pool_of: Mapping[str, str] = SPLIT,
        settings: Mapping[str, Any] = {},
        write_s: float | None = None,
        found: Restored[FakeBatch] | None = None,
        **ports: Any,
    ) -> Run:
        export: Exporting = ports.pop("export", Exporting())
        world = World(num_rows=ports.pop("num_rows", NUM_ROWS))
        if write_s is not None:
            world.durations["write"] = write_s
        if export.upload_s is not None:
            world.durations["upload"] = export.upload_s
        live = LiveSettings(
            total_steps=steps,
            validate_every_steps=validate_every,
            checkpoint_every_steps=save_every,
            checkpoint_keep=1,
        )
        monitor, checkpoints = FakeMonitor(live), FakeCheckpoints(world, found)
        exports = FakeExports(world, export.left)
        # As `pools_of_phases` has it: these two are on CPU cores.
        on_gpus = {role: pool for role, pool in pool_of.items() if role not in ("data", "reward")}
        phases = Phases(on_gpus, 1000.0, clock=lambda: world.time.now)
        schedule = mode if isinstance(mode, Schedule) else schedule_of(mode)
        world.in_flight = schedule.in_flight
        plugged = fake_ports(world, **ports)
        kl = AdaptiveKLController(0.1, target=1.0, horizon=100)
        ppo = PPO(plugged, schedule, phases, PPOSettings(pool_of, 8, **settings), kl)
        loop_settings = LoopSettings(
            has_validation=True,
            validates_first=True,
            exports_final=True,
            exports_each=export.is_each,
            uploads=export.upload_s is not None,
            num_gpus=3,
            saves_in_background=write_s is not None,
        )
        loop = TrainingLoop(ppo, plugged, Storage(checkpoints, exports), monitor, phases, schedule, loop_settings)
        return Run(world, monitor, checkpoints, exports, loop, ppo)

    return make


StopAt = Callable[[Run, str], Awaitable[Outcome]]


@pytest.fixture
def stop_at() -> StopAt:
    """Return a function that runs, and asks to stop when the phase of that name starts."""

    async def run_until(run: Run, phase: str) -> Outcome:
        begin = run.world.phase

        async def watched(what: str, step: int = 0, num_rows: int | None = None) -> None:
            if phase == (f"{what} {step}" if step else what):
                run.monitor.stopping.set()
            await begin(what, step, num_rows)

        run.world.phase = watched  # type: ignore[method-assign]
        return await run()

    return run_until
