"""Reports the run to files, the console and the operator, and receives settings and requests from outside.

Implements `controller.ports.MonitorPort` for `run`. Live settings and checkpoint requests arrive in the operator's
replies. A stop request comes from a signal (an Event), from the operator, or from a pod of the RayCluster that is being
deleted (`ppojob hold` writes a file). A reply that fences this attempt out ends the run at once. So does the answer
that the PPOJob was deleted, if a pod is being deleted too; without that, the RayCluster is kept (`--cascade=orphan`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ppojob_api.v1alpha1.constants import EnvName
from ppojob_api.v1alpha1.progress import Activity, Command, LiveSettings
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_api.v1alpha1.secrecy import shown
from ppojob_trainer.checkpoints import FencedOutError
from ppojob_trainer.controller.layout import layout_of
from ppojob_trainer.controller.monitor_port import Uploaded
from ppojob_trainer.controller.recommendation import NUM_STEPS, Recommendation, recommend
from ppojob_trainer.main.terminating_pods import TerminatingPods
from ppojob_trainer.telemetry import (
    MetricLogger,
    ProgressReporter,
    RunFiles,
    RunProgress,
    TrackedRun,
    open_trackers,
    read_metrics,
    write_advice,
)

__all__ = ["JobDeletedError", "Monitor"]

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_ORPHANED_AFTER_S = 120.0
"""Kubernetes deletes a deleted job's pods within seconds. Later, a pod that was orphaned is drained."""

FROM_THE_START = -1


class JobDeletedError(RuntimeError):
    """The PPOJob was deleted, and with it the pods: no attempt follows, and no checkpoint is needed."""


class Monitor:
    """See the module's docstring."""

    def __init__(self, job: JobFile, attempt: int, files: RunFiles, stop: threading.Event) -> None:
        self.observed: Callable[[int], Mapping[str, float]] | None = None
        """Returns the metrics that the processes collected in a step; set before the loop starts."""
        self.once: Mapping[str, float] = {}
        """Metrics that do not change from step to step; added to the first step that is recorded."""
        self._job = job
        self._files = files
        self._attempt = attempt
        self._stop = stop
        self._settings = LiveSettings.of(job.spec.trainer, job.spec.checkpoint)
        self._steps_per_epoch = 0
        self._stopping = asyncio.Event()
        # When the PPOJob was reported as deleted; whether a pod is being deleted, and that not with the PPOJob.
        self._deleted_at: float | None = None
        self._knows_of_pod = False
        self._is_orphaned = False
        self._layout = layout_of(job.spec)
        self._steps: list[Mapping[str, float]] = []
        self._seen_first = False
        self._recommendation: Recommendation | None = None
        self._metrics: MetricLogger | None = None
        self._progress = RunProgress(uid=job.uid, attempt=attempt, total_steps=self.total_steps)
        self._reporter = ProgressReporter(job.reporting) if job.reporting else None
        self._terminating_pods = TerminatingPods(files, os.environ.get(EnvName.RAY_CLUSTER))

    def start(self, resume_step: int | None = None) -> None:
        """Start to report; `resume_step` is the step of the checkpoint that the run resumes from."""
        self._terminating_pods.forget()
        if resume_step is not None:
            # While the processes start and load, report the step of the checkpoint, not step 0.
            self._progress.restore(read_metrics(self._files.metrics), step=resume_step)
        if self._reporter is not None:
            self._reporter.start()
        self._report()

    def note_end(self) -> None:
        """Say that no process works for this attempt any more, so that its pods may be deleted."""
        self._terminating_pods.note_end()

    def close(self) -> None:
        """Finish the files and send the last report."""
        if self._recommendation is not None and self._recommendation.text:
            logger.info("%s", self._recommendation.text)
        if self._metrics is not None:
            self._metrics.close()
        if self._reporter is not None:
            self._reporter.update(self._progress.report())
            # A deleted job has no status to write.
            if not self._reporter.is_job_deleted and not self._reporter.close():
                logger.warning("the last report did not reach the operator; the job's storage has its content")

    async def watch(self) -> None:
        """Watch for a stop request and for new settings; runs until it is cancelled.

        Raises:
            FencedOutError: the operator reports that a newer attempt replaced this one.
            JobDeletedError: the operator reports that the PPOJob was deleted, and a pod is being deleted with it. Of a
                job that was deleted without its pods (--cascade=orphan), a drained pod stops the run gracefully.
        """
        deletion = asyncio.create_task(self._terminating_pods.detected())
        try:
            while True:
                self._check(is_pod_deleted=deletion.done())
                await asyncio.sleep(_POLL_S)
        finally:
            deletion.cancel()

    def _check(self, *, is_pod_deleted: bool) -> None:
        reporter = self._reporter
        is_requested = reporter is not None and reporter.reply.command is Command.STOP
        if not self._stopping.is_set() and (self._stop.is_set() or is_requested or is_pod_deleted):
            logger.info("stop requested: the trainer finishes the work that cannot be dropped first")
            self._stopping.set()
        if reporter is None:
            return
        self._note_deletions(reporter.is_job_deleted, is_pod_deleted)
        is_deleted_with_it = is_pod_deleted and not self._is_orphaned
        if reporter.is_job_deleted and (is_deleted_with_it or reporter.fenced_out.is_set()):
            raise JobDeletedError("the PPOJob was deleted: the run ends at once, without a checkpoint")
        if reporter.fenced_out.is_set():
            raise FencedOutError(str(self._files.root), attempt=self._attempt, newer=self._attempt + 1)
        self._take(reporter.reply.settings)

    def _note_deletions(self, is_job_deleted: bool, is_pod_deleted: bool) -> None:
        """Note when the PPOJob was deleted, and at a pod's deletion whether it belongs to that."""
        now = time.monotonic()
        if not is_job_deleted:
            self._deleted_at = None
        elif self._deleted_at is None:
            self._deleted_at = now
        if is_pod_deleted and not self._knows_of_pod:
            self._knows_of_pod = True
            self._is_orphaned = self._deleted_at is not None and now - self._deleted_at > _ORPHANED_AFTER_S
            # The answer says whether the PPOJob was deleted, or its pods alone.
            self._report(now=True)

    def _take(self, settings: LiveSettings | None) -> None:
        if settings is None or settings == self._settings:
            return
        logger.info("new settings: %s", settings)
        self._settings = settings
        self._set_length()

    def count_epochs(self, steps_per_epoch: int) -> None:
        """Take over how many steps an epoch of the loaded data has; with totalEpochs, the run's length is known now."""
        self._steps_per_epoch = steps_per_epoch
        self._set_length()
        if self._settings.total_epochs is not None:
            text = "%d epochs of %d steps: the run has %d steps"
            logger.info(text, self._settings.total_epochs, steps_per_epoch, self.total_steps)
        self._report()

    def _set_length(self) -> None:
        self._progress.total_steps = self.total_steps
        if self._metrics is not None:
            self._metrics.set_total_steps(self.total_steps)

    # What the loop reads.

    @property
    def settings(self) -> LiveSettings:
        """See `MonitorPort`."""
        return self._settings

    @property
    def total_steps(self) -> int:
        """See `MonitorPort`."""
        return self._settings.steps(self._steps_per_epoch)

    @property
    def is_stopping(self) -> bool:
        """See `MonitorPort`."""
        return self._stopping.is_set()

    @property
    def checkpoint_request(self) -> str | None:
        """See `MonitorPort`."""
        return self._reporter.reply.checkpoint_request if self._reporter is not None else None

    async def wait_for_stop(self) -> None:
        """See `MonitorPort`."""
        await self._stopping.wait()

    # What the loop reports.

    def set_activity(self, activity: Activity) -> None:
        """See `MonitorPort`."""
        self._progress.set_activity(activity)
        self._report()

    def resumed(self, step: int) -> None:
        """See `MonitorPort`."""
        logger.info("resuming after step %d", step)
        self._progress.restore(read_metrics(self._files.metrics), step=step)
        self._open(step)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `MonitorPort`."""
        if self.observed is not None:
            metrics = {**metrics, **self.observed(step)}
        metrics, self.once = {**metrics, **self.once}, {}
        self._progress.record(step, metrics)
        self._recommend(step, metrics)
        # The run restarts from step 0: the records of an earlier attempt without a checkpoint are obsolete.
        self._open(FROM_THE_START).log(step, metrics)
        self._report()

    def saved(self, step: int, location: str, request: str | None) -> None:
        """See `MonitorPort`."""
        logger.info("checkpoint of step %d: %s", step, location)
        self._progress.set_checkpoint(step, location, request=request)
        # Report at once: a user may wait for the answer to the request.
        self._report(now=request is not None)

    def exported(self, path: Path) -> None:
        """See `MonitorPort`."""
        logger.info("the policy is in %s", path)
        self._progress.set_model(str(path))
        self._report()

    def uploaded(self, result: Uploaded) -> None:
        """See `MonitorPort`."""
        if result.failure is None:
            logger.info("the policy is uploaded: %s", result.address)
        else:
            logger.error("%s: %s", result.failure.reason, result.failure.message)
        self._progress.set_upload(result.address, result.failure)
        self._report()

    def _recommend(self, step: int, metrics: Mapping[str, float]) -> None:
        # The first step allocates and compiles, also after a restart, when the list is empty again.
        if self._seen_first and step > 0:
            self._steps = [*self._steps, metrics][-NUM_STEPS:]
        self._seen_first = self._seen_first or step > 0
        found = recommend(self._steps, self._job.spec, self._layout)
        if found is not None and found != self._recommendation:
            self._recommendation = found
            self._progress.set_recommendation(found.text, found.layouts)
            try:
                write_advice(self._files.recommendation, found.text, found.layouts)
            except OSError as error:
                logger.warning("%s does not have the new recommendation: %s", self._files.recommendation, error)

    def _open(self, resume_step: int) -> MetricLogger:
        if self._metrics is None:
            telemetry = self._job.spec.telemetry
            # On a cluster Prometheus scrapes from another pod; on a local machine only this host needs access.
            address = "0.0.0.0" if self._job.reporting is not None else "127.0.0.1"
            self._metrics = MetricLogger.open(
                self._files,
                total_steps=self.total_steps,
                resume_step=resume_step,
                prometheus=(address, telemetry.prometheus_port) if telemetry.prometheus_port else None,
                trackers=open_trackers(telemetry.trackers, self._tracked()),
            )
        return self._metrics

    def _tracked(self) -> TrackedRun:
        job = self._job
        project = job.spec.telemetry.tracker_project
        return TrackedRun(project, f"{job.namespace}-{job.name}", job.uid, shown(job.spec), self._files.root)

    def phase_is_done(self) -> None:
        """Count one more finished phase in the next report: this shows progress within a long step too."""
        self._progress.phase_is_done()
        self._report()

    def _report(self, *, now: bool = False) -> None:
        if self._reporter is not None:
            self._reporter.update(self._progress.report(), now=now)
