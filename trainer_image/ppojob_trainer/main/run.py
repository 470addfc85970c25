"""`run_job`: one attempt of a job, from the connection to Ray to the last report.

    claim the checkpoints ─ connect Ray ─ place the pools ─ start the processes ─ check ─ load ─ loop ─ report ─ end

Called by the command line and by `__main__`. A failure is raised with its name, as `JobFailedError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import ExportPolicy
from ppojob_trainer.checkpoints import (
    BucketError,
    Checkpoint,
    CheckpointStore,
    FencedOutError,
    last_attempt,
    open_store,
)
from ppojob_trainer.controller.dynamic_sampling import sampling_of
from ppojob_trainer.controller.layout import pools_of_phases, pools_of_roles
from ppojob_trainer.controller.loop import LoopSettings, Outcome, TrainingLoop
from ppojob_trainer.controller.phases import Phases
from ppojob_trainer.controller.ppo import PPO, PPOSettings
from ppojob_trainer.controller.schedule import is_one_update, schedule_for
from ppojob_trainer.controller.storage_ports import Storage
from ppojob_trainer.engines.errors import HostLostError
from ppojob_trainer.main.checkpoints import JobCheckpoints
from ppojob_trainer.main.connection import connected
from ppojob_trainer.main.exports import JobExports, check_target
from ppojob_trainer.main.failures import JobFailedError, failure_record
from ppojob_trainer.main.groups import Groups, continuing_roles, launch, make_ready
from ppojob_trainer.main.monitor import JobDeletedError, Monitor
from ppojob_trainer.maths.kl import make_kl_controller
from ppojob_trainer.telemetry import RunFiles, TraceWriter, check_installed
from ppojob_trainer.worker_groups.connections import between_pools, connection_metrics, report
from ppojob_trainer.worker_groups.errors import WorkerGroupError
from ppojob_trainer.worker_groups.launch import Launcher
from ppojob_trainer.worker_groups.lost_objects import explained
from ppojob_trainer.worker_groups.observation import observed_metrics
from ppojob_trainer.worker_groups.placement import PlacedPool, are_connected, place
from ppojob_trainer.worker_groups.roles.rollout_group import is_loss
from ppojob_trainer.worker_groups.survivors import NO_SURVIVORS, Names, find_survivors, note_logs

__all__ = ["PLACEMENT_TIMEOUT_S", "run_job"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STORAGE_TIMEOUT_S = 10.0
PLACEMENT_TIMEOUT_S = 120.0
"""Seconds. The operator submits when the pods are ready, so their resources are there already or will not appear."""


def run_job(job: JobFile, *, attempt: int, stop: threading.Event, has_successor: bool = False) -> Outcome:
    """Run an attempt of a job to its end, or until `stop` is set.

    Args:
        job: its spec is resolved.
        attempt: the attempt's number; the highest one owns the storage.
        stop: set it for a graceful stop: a step that already changes the models is finished, then a checkpoint is
            saved.
        has_successor: another attempt in the same Ray cluster may follow. After the loss of a process and after a
            stop, this one leaves it the processes that can continue.

    Returns:
        How it ended.

    Raises:
        JobFailedError: the attempt failed; `record` has the name.
    """
    files = RunFiles(Path(job.root))
    # The threads of tqdm and of the tokenizers only disturb the logs of many processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        check_installed(job.spec.telemetry.trackers)
        store = open_store(job.checkpoints, uid=job.uid, attempt=attempt)
        resume_from = job.spec.checkpoint.resume_from
        store.claim(adopts=resume_from is not None, adopted_uid=job.adopted_uid)
        # Before anything starts, so that a broken checkpoint costs no GPU time.
        found = store.resume_point(job.resume, resume_from)
        check_target(job)
        with connected(job.spec):
            return asyncio.run(_Attempt(job, attempt, files, store, stop, found, has_successor=has_successor).run())
    except Exception as error:
        raise JobFailedError(failure_record(error)) from error


@dataclass(frozen=True)
class _Watched:
    """Writes each finished phase to the trace, and notifies the monitor."""

    trace: TraceWriter
    monitor: Monitor

    def record(self, name: str, *, pool: str, role: str, start: float, end: float, step: int) -> None:
        """See `controller.phases.Trace`."""
        self.trace.record(name, pool=pool, role=role, start=start, end=end, step=step)
        self.monitor.phase_is_done()


class _Attempt:
    """One attempt, inside an event loop."""

    def __init__(
        self,
        job: JobFile,
        attempt: int,
        files: RunFiles,
        store: CheckpointStore,
        stop: threading.Event,
        found: Checkpoint | None,
        *,
        has_successor: bool,
    ) -> None:
        self._job = job
        self._attempt = attempt
        self._files = files
        self._store = store
        self._found = found
        self._monitor = Monitor(job, attempt, files, stop)
        self._pools: dict[str, PlacedPool] = {}
        self._groups: Groups | None = None
        self._has_successor = has_successor
        self._survivors = NO_SURVIVORS
        # Whether the processes that may continue in the next attempt are left to it.
        self._are_left = False
        self._saves_in_background = False
        self._trace = TraceWriter(files.trace)
        limit_s = float(job.spec.trainer.phase_timeout_seconds)
        self._phases = Phases(pools_of_phases(job.spec), limit_s, _Watched(self._trace, self._monitor))

    async def run(self) -> Outcome:
        self._monitor.start(None if self._found is None else self._found.step)
        watch = asyncio.create_task(self._monitor.watch())
        is_finished = is_superseded = False
        try:
            if not await self._unless_stopped(self._start(), watch):
                return Outcome(0, is_finished=False)
            outcome = await _first(asyncio.create_task(self._train()), watch)
            is_finished = outcome.is_finished
            # A stop may be for the sake of a few pods.
            self._are_left = not is_finished
            return outcome
        except FencedOutError:
            is_superseded = True
            raise
        except JobDeletedError:
            self._has_successor = False
            raise
        except WorkerGroupError as error:
            groups = self._groups
            reason = error if groups is None else await explained(error, groups.all(), groups.lost)
            self._are_left = is_loss(reason)
            # Of a host that is silent, Ray may still believe that it is there.
            is_silent = isinstance(reason.__cause__, HostLostError)
            reason.only_processes = self._are_left and not is_silent and are_connected(self._pools.values())
            if reason is error:
                raise
            raise reason from error
        finally:
            watch.cancel()
            is_superseded = is_superseded or (not is_finished and await self._is_superseded())
            self._end(is_superseded=is_superseded)
            if not is_superseded:
                await asyncio.to_thread(self._monitor.note_end)
            # After the processes have ended, because the last report may take long.
            await asyncio.to_thread(self._monitor.close)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None], watch: asyncio.Task[None]) -> bool:
        """Await `work`; return False if a stop was requested first."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._monitor.wait_for_stop())
        try:
            await asyncio.wait({task, stopped, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            if not task.done():
                return False
            task.result()
            return True
        finally:
            await _cancel(task, stopped)

    async def _start(self) -> None:
        spec = self._job.spec
        folder = self._files.logs / f"attempt-{self._attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        if self._has_successor:
            names, has_checkpoint = Names.of(self._job.uid, spec, self._attempt), self._found is not None
            self._survivors = await find_survivors(names, continuing_roles(spec), can_continue=has_checkpoint)
            note_logs(self._survivors.logs, folder)
        self._pools = await place(spec, PLACEMENT_TIMEOUT_S, self._survivors)
        limit_s, profile = float(spec.trainer.phase_timeout_seconds), spec.telemetry.profile
        launcher = Launcher(
            folder,
            limit_s,
            run_folder=self._files.root,
            profile=profile,
            survivors=self._survivors,
            attempt=self._attempt,
        )
        pool_of = pools_of_roles(spec)
        self._monitor.observed = lambda step: {
            **observed_metrics(launcher.observations.take(step), pool_of),
            **self._engine_counts(),
        }
        self._groups = launch(spec, self._pools, launcher)
        ready = await make_ready(self._groups, spec, self._phases)
        self._saves_in_background = ready.saves_in_background
        self._monitor.count_epochs(ready.steps_per_epoch)
        connections = [*ready.connections, *between_pools(self._pools.values())]
        report(connections, {pool.name: pool for pool in spec.pools}, folder)
        self._monitor.once = {
            **connection_metrics(connections),
            "restart/kept_processes": float(self._survivors.number),
        }

    def _engine_counts(self) -> dict[str, float]:
        """Return pool/<name>/engines: the engines of each elastic pool that generate."""
        elastic = [] if self._groups is None else self._groups.elastic
        return {f"pool/{rollout.pool}/engines": float(len(rollout.engines)) for rollout in elastic}

    async def _train(self) -> Outcome:
        assert self._groups is not None, "_start() comes first"
        spec, phases, ports = self._job.spec, self._phases, self._groups.ports()
        schedule = schedule_for(spec)
        controller = spec.algorithm.kl.controller
        kl = make_kl_controller(controller.type.value, controller.coefficient, controller.target, controller.horizon)
        settings = PPOSettings(
            pools_of_roles(spec),
            spec.data.max_response_length,
            spec.critic.warmup_steps,
            is_one_update=is_one_update(spec),
            is_bypassed=spec.algorithm.bypasses_old_log_probs,
            sampling=sampling_of(spec),
            gpus={pool.name: pool.gpus for pool in spec.pools},
        )
        ppo = PPO(ports, schedule, phases, settings, kl)
        saved = JobCheckpoints(self._store, self._groups, spec, self._found)
        exports = JobExports(self._job, self._groups, self._files, self._attempt, self._monitor.phase_is_done)
        of_loop = loop_settings(spec, saves_in_background=self._saves_in_background)
        loop = TrainingLoop(ppo, ports, Storage(saved, exports), self._monitor, phases, schedule, of_loop)
        watching = [asyncio.create_task(rollout.watch()) for rollout in self._groups.elastic]
        try:
            return await loop.run()
        finally:
            await _cancel(*watching)

    def _end(self, *, is_superseded: bool) -> None:
        """Terminate the processes, then release the bundles. All files are written by then.

        After a loss or a stop, and if the next attempt has begun, the processes that may continue in it stay.
        """
        left = self._survivors if self._are_left or is_superseded else NO_SURVIVORS
        if self._groups is not None:
            for group in self._groups.all():
                if not left.may_continue(group.role):
                    group.kill()
            for rollout in self._groups.elastic:
                rollout.release()
        for pool in self._pools.values():
            if pool.name not in left.roles:
                pool.release()
        self._trace.close()

    async def _is_superseded(self) -> bool:
        """Whether another attempt has begun, which uses the processes now. False if the storage does not say."""
        if not self._has_successor:
            return False
        with contextlib.suppress(OSError, BucketError, TimeoutError):
            reading = asyncio.to_thread(last_attempt, self._job.checkpoints)
            newest = await asyncio.wait_for(reading, _STORAGE_TIMEOUT_S)
            return newest is not None and newest > self._attempt
        return False


def loop_settings(spec: PPOJobSpec, *, saves_in_background: bool) -> LoopSettings:
    """Return the loop's settings, from the spec and from the memory of the hosts (`saves_in_background`)."""
    return LoopSettings(
        has_validation=spec.data.validation is not None,
        validates_first=spec.trainer.validate_before_training,
        exports_final=spec.checkpoint.export is not ExportPolicy.NEVER,
        exports_each=spec.checkpoint.export is ExportPolicy.EACH,
        num_gpus=sum(pool.gpus for pool in spec.pools),
        saves_in_background=saves_in_background,
        uploads=spec.checkpoint.export_to is not None,
    )


async def _first(work: asyncio.Task[T], watch: asyncio.Task[None]) -> T:
    """Await `work`; `watch` ends first only with an error, which is then raised."""
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            watch.result()
        return await work
    finally:
        await _cancel(work)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
