"""The run: resume, validation, steps, checkpoints, export. `ppo` defines a single step.

    restore ─ validate ─┬─ generate ─ prepare ─ apply ─ validate? ─┬─ critic done ─ record ─ checkpoint? ─┬─ export
                        └──────────────◀───────────────────────────┘                                      │
                          Overlapped: the next step begins here; its apply waits for the record and the ◀─┘
                          checkpoint of this one. The other modes wait for both first.

A stop is graceful: a step is dropped before its advantages are computed and finished afterwards; then a checkpoint is
saved if a step was finished since the last one. A requested checkpoint is saved after the current step. Called by
`main` with ports; it touches neither processes nor files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from ppojob_api.v1alpha1.progress import Activity
from ppojob_trainer.controller.errors import StoppedError
from ppojob_trainer.controller.generation import OWN, Generation
from ppojob_trainer.controller.metrics import throughput_metrics
from ppojob_trainer.controller.monitor_port import MonitorPort
from ppojob_trainer.controller.phases import Phase, Phases
from ppojob_trainer.controller.ports import B, Ports
from ppojob_trainer.controller.ppo import PPO
from ppojob_trainer.controller.queue import Generated
from ppojob_trainer.controller.schedule import Schedule
from ppojob_trainer.controller.storage_ports import Restored, Storage

__all__ = ["LoopSettings", "Outcome", "TrainingLoop"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class LoopSettings:
    """The settings of the spec that the loop reads, except the live settings.

    exports_final, exports_each: when the policy is written as a HuggingFace folder. saves_in_background: steps continue
    while a checkpoint is written. num_gpus: of all pools. uploads: exports are uploaded to checkpoint.exportTo.
    """

    has_validation: bool
    validates_first: bool
    exports_final: bool
    exports_each: bool
    num_gpus: int
    saves_in_background: bool = False
    uploads: bool = False


@dataclass(frozen=True)
class Outcome:
    """How the run ended: all steps done, or a graceful stop after `step`."""

    step: int
    is_finished: bool


class TrainingLoop(Generic[B]):
    """Runs all steps of a job, once."""

    def __init__(
        self,
        ppo: PPO[B],
        ports: Ports[B],
        storage: Storage[B],
        monitor: MonitorPort,
        phases: Phases,
        schedule: Schedule,
        settings: LoopSettings,
    ) -> None:
        self._ppo = ppo
        self._ports = ports
        self._checkpoints = storage.checkpoints
        self._exports = storage.exports
        self._monitor = monitor
        self._phases = phases
        self._generation = Generation(ports, phases, ppo.load_again)
        self._schedule = schedule
        self._settings = settings
        self._step = 0
        self._saved_step = 0
        self._ppo_state: Mapping[str, Any] = {}
        # The last step's record and checkpoint, if the next step does not wait for them.
        self._closing: asyncio.Task[None] | None = None
        # The checkpoint that is being written (at most one), and the last request that was answered with one.
        self._writing: asyncio.Task[None] | None = None
        self._request: str | None = None
        # How long the last complete checkpoint took, until a step's metrics have it.
        self._write_seconds: float | None = None
        # The step that was exported last, and the upload of an export (at most one).
        self._exported_step = 0
        self._uploading: asyncio.Task[None] | None = None

    async def run(self) -> Outcome:
        """Run until the last step is done or the monitor reports a stop request."""
        try:
            await self._restore()
            try:
                await self._steps()
            except StoppedError:
                logger.info("stopping after step %d", self._step)
                # The next attempt repeats the generations with the current weights.
                self._ppo.queue.drop(version=self._step)
            await self._settle()
            if self._monitor.is_stopping and self._step < self._monitor.total_steps:
                await self._save_stopped()
                return Outcome(self._step, is_finished=False)
            return Outcome(self._step, is_finished=await self._finish())
        finally:
            self._drop(self._closing)
            self._drop(self._writing)
            self._drop(self._uploading)
            self._ppo.close()

    async def _restore(self) -> None:
        found = await self._phases.run(Phase.LOAD_CHECKPOINT, "actor", 0, self._checkpoints.restore())
        if found is None:
            return
        step, state = found.step, found.state
        await self._phases.run(Phase.LOAD_CHECKPOINT, "data", 0, self._ports.data.restore(step, state["data"]))
        self._ppo.restore(state)
        self._step = self._saved_step = step
        await self._restore_queue(found)
        # The engines start with the initial weights.
        await self._phases.run(Phase.UPDATE_WEIGHTS, OWN, step, self._ports.weights.push(step))
        self._monitor.resumed(step)
        left = self._exports.newest(step) if self._settings.uploads else None
        if left is not None:
            self._uploading = asyncio.create_task(self._upload(left))

    async def _restore_queue(self, found: Restored[B]) -> None:
        """Take over the saved responses that are not too old for this schedule. Their prompts are read again."""
        saved = found.state.get("queue", {"base": found.step, "versions": []})
        self._ppo.queue.restore(found.step, saved["base"] if found.batches else found.step)
        for step, (version, batch) in enumerate(zip(saved["versions"], found.batches, strict=True), found.step + 1):
            if not self._ppo.queue.allows(step, version):
                break
            reading = self._ports.data.prompts(step)
            prompts = await self._phases.run(Phase.LOAD_CHECKPOINT, "data", 0, reading)
            rollout = self._ports.rollout.joined(batch)
            whole = prompts.batch.union(batch)
            self._ppo.queue.put(Generated(step, whole, rollout, prompts.epoch, version))

    async def _steps(self) -> None:
        if self._step == 0 and self._settings.validates_first and self._validates:
            self._monitor.record(0, await self._validate())
        if self._schedule.max_staleness:
            self._ppo.queue.begin(self._step, self._monitor.total_steps)
        start = self._phases.now()
        while self._step < self._monitor.total_steps:
            start = await self._one_step(self._step + 1, start)

    async def _one_step(self, step: int, start: float) -> float:
        """Run a step whose time is counted from `start`; return the time from which the next step is counted."""
        if self._monitor.is_stopping:
            raise StoppedError
        self._monitor.set_activity(Activity.TRAINING)
        if self._writing is not None and self._writing.done():
            # A failed save ends the run now, not at the next checkpoint.
            await self._written()
        prepared = await self._or_stop(self._ppo.prepare(step))
        # The last step's checkpoint must hold its models before they change again.
        await self._settle()
        if self._monitor.is_stopping:
            raise StoppedError
        metrics = {**prepared.metrics, **await self._ppo.apply(prepared, partial(self._has_engine, step))}
        # From here on the models are those after `step`, except that the critic's update may still run.
        self._step = step
        # The next step's generation and advantages may change it before this step is saved.
        self._ppo_state = self._ppo.state()
        goes_ahead = self._schedule.next_generation and step < self._monitor.total_steps
        if not goes_ahead:
            await self._ppo.critic_metrics()
        end = self._phases.now()
        if self._validates and self._is_due(step, self._monitor.settings.validate_every_steps):
            metrics |= await self._validate_unless_stopped()
        if not goes_ahead or self._monitor.is_stopping:
            await self._close_step(step, metrics, start, end)
            return self._phases.now()
        self._ppo.queue.begin(step, self._monitor.total_steps)
        next_start = self._phases.now()
        self._closing = asyncio.create_task(self._close_step(step, metrics, start, end))
        return next_start

    async def _has_engine(self, step: int) -> bool:
        """Wait until the weights can be sent to any engine; return False if a stop is requested.

        The step is finished either way, and the next attempt sends its weights.
        """
        waiting = self._ppo.queue.unless_failed(self._ports.weights.wait_for_engine())
        try:
            # With the limit and the watchdog of a phase: a process may not answer.
            await self._or_stop(self._phases.run(Phase.UPDATE_WEIGHTS, OWN, step, waiting))
        except StoppedError:
            return False
        return True

    async def _close_step(self, step: int, metrics: dict[str, float], start: float, end: float) -> None:
        """Wait for the critic and the hooks; then record the step, and save a checkpoint if one is due."""
        metrics |= await self._ppo.late_metrics()
        metrics |= self._phases.timings(step) | self._phases.close_window(start, end)
        metrics |= throughput_metrics(metrics, end - start, self._settings.num_gpus)
        if self._is_due(step, self._monitor.settings.checkpoint_every_steps) or self._is_requested():
            metrics["timing_s/save_checkpoint"] = await self._save()
        if self._write_seconds is not None:
            metrics["timing_s/checkpoint/write"], self._write_seconds = self._write_seconds, None
        # Before the export, whose model card has the metrics of all steps.
        self._monitor.record(step, metrics)
        if self._saved_step == step:
            await self._export_each()
            self._monitor.set_activity(Activity.TRAINING)
        self._phases.forget(step - 1)

    async def _settle(self) -> None:
        """Wait until `_close_step` is done."""
        closing, self._closing = self._closing, None
        if closing is not None:
            await closing

    async def _save_stopped(self) -> None:
        is_saved = self._saved_step == self._step
        await self._save()
        await self._written()
        if not is_saved:
            await self._export_each()

    async def _finish(self) -> bool:
        """Save and export the last step; return False if a stop was requested before the export was uploaded."""
        await self._save()
        await self._written()
        try:
            if self._settings.exports_final and self._exported_step != self._step:
                await self._export()
            await self._uploaded()
        except StoppedError:
            logger.info("stopping before the export is uploaded; the next attempt uploads it")
            return False
        self._monitor.set_activity(Activity.FINISHED)
        return True

    async def _export_each(self) -> None:
        """Export the step of a checkpoint, if the job exports all of them and no stop comes during the last upload."""
        if self._settings.exports_each:
            # The step is done and saved, so its caller need not know that its export was dropped.
            with contextlib.suppress(StoppedError):
                await self._export()

    async def _export(self) -> None:
        """Export the policy, and begin to upload it.

        Raises:
            StoppedError: an earlier upload was still running, whose export this one may delete.
        """
        await self._uploaded()
        self._monitor.set_activity(Activity.EXPORTING)
        step, keep = self._step, self._monitor.settings.checkpoint_keep
        path = await self._phases.run(Phase.EXPORT, "actor", step, self._exports.export(step, keep))
        self._exported_step = step
        self._monitor.exported(path)
        if self._settings.uploads:
            self._uploading = asyncio.create_task(self._upload(step))

    async def _upload(self, step: int) -> None:
        self._monitor.uploaded(await self._exports.upload(step))

    async def _uploaded(self) -> None:
        """Wait until nothing is being uploaded; a stop drops the upload, and the next attempt makes it.

        Raises:
            StoppedError: it was dropped.
        """
        uploading, self._uploading = self._uploading, None
        if uploading is not None:
            await self._or_stop(_awaited(uploading))

    @property
    def _validates(self) -> bool:
        return self._settings.has_validation and self._monitor.settings.validate_every_steps > 0

    def _is_due(self, step: int, every: int) -> bool:
        return step >= self._monitor.total_steps or (every > 0 and step % every == 0)

    def _is_last(self, step: int) -> bool:
        return self._monitor.is_stopping or step >= self._monitor.total_steps

    def _is_requested(self) -> bool:
        return self._monitor.checkpoint_request not in (None, self._request)

    async def _save(self) -> float:
        """Save a checkpoint of the last finished step, unless it has one; return the seconds that it took.

        For a save in the background these are the seconds until the models may change. Waits for an earlier save first.
        """
        if self._step == self._saved_step:
            return 0.0
        self._monitor.set_activity(Activity.SAVING)
        start, step = self._phases.now(), self._step
        self._request = self._monitor.checkpoint_request or self._request
        await self._ppo.critic_metrics()
        await self._written()
        waiting = await self._ppo.queue.of_older_weights(step)
        position = await self._phases.run(Phase.DATA, "data", step, self._ports.data.state(step))
        state = {"data": position, **self._ppo_state}
        if waiting:
            state["queue"] = {"base": self._ppo.queue.base, "versions": [one.version for one in waiting]}
        keep = self._monitor.settings.checkpoint_keep
        # After the last step nothing changes the models, so no copy is needed.
        in_background = self._settings.saves_in_background and not self._is_last(step)
        batches = [one.rollout.batch for one in waiting]
        staging = self._checkpoints.stage(step, in_background=in_background, batches=batches)
        await self._phases.run(Phase.SAVE_CHECKPOINT, "actor", step, staging)
        self._saved_step = step
        self._writing = asyncio.create_task(self._commit(step, state, keep, self._request, start))
        if not in_background:
            await self._phases.run(Phase.SAVE_CHECKPOINT, "actor", step, self._written())
        return self._phases.now() - start

    async def _commit(self, step: int, state: Mapping[str, Any], keep: int, request: str | None, start: float) -> None:
        location = await self._checkpoints.commit(step, state, keep)
        self._write_seconds = self._phases.now() - start
        self._monitor.saved(step, location, request)

    async def _written(self) -> None:
        """Wait until the last checkpoint is complete; if it failed, the run fails."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def _validate(self) -> dict[str, float]:
        self._monitor.set_activity(Activity.VALIDATING)
        if self._ppo.queue.loaded != self._step and not await self._has_engine(self._step):
            raise StoppedError
        await self._ppo.load_engines(self._step)
        return await self._or_stop(self._validation_metrics())

    async def _validate_unless_stopped(self) -> dict[str, float]:
        """Validate; a stop drops the validation but not the finished step."""
        try:
            return await self._validate()
        except StoppedError:
            return {}

    async def _validation_metrics(self) -> dict[str, float]:
        ports, step = self._ports, self._step
        prompts = await self._phases.run(Phase.VALIDATE, "data", step, ports.data.validation_prompts())
        rollout = await self._generation.validate(prompts, step)
        batch = prompts.batch.union(rollout.batch)
        judging = ports.reward.validate(batch, await self._ppo.validation_scores(batch, step))
        return dict(await self._phases.run(Phase.VALIDATE, "reward", step, judging))

    async def _or_stop(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or cancel it when a stop is requested.

        Raises:
            StoppedError: it was dropped.
        """
        task, stop = asyncio.create_task(work), asyncio.create_task(self._monitor.wait_for_stop())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise StoppedError
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def _drop(self, task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            task.cancel()
            # Retrieve its exception: if it failed by itself, that is not the error that ended the run.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _awaited(task: asyncio.Task[T]) -> T:
    return await task
