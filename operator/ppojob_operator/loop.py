"""The reconcile loop: observe a job, decide, apply, and write its status once.

        handlers (watches)        timers (requeue_after)        resync (all jobs, every few minutes)
                 |                          |                              |
                 +----------> WorkQueue: one entry per job; no two workers reconcile the same job
                                            |
                              workers: adopt -> observe (cluster, dashboard) -> reconcile.decide -> execute the plan

Between reconciles, a job's RayCluster and pods are cached until a watch reports a change; only the job and Ray's
dashboard are read each time. Otherwise a thousand running jobs would list their pods a hundred times per second. The
resync does not rely on the watches and reads everything again.

`leader_tasks.py` runs the loop; `handlers` only enqueue keys. An error of one job is logged and the job is retried with
exponential backoff; other jobs are not affected.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import Any

from ppojob_api.v1alpha1.status import Retries
from ppojob_operator import logs
from ppojob_operator.adoption import Adopter, own_identity
from ppojob_operator.api_server import ApiError, ApiFailed, ApiRefused, ApiUnavailable, NamespaceTerminatingError
from ppojob_operator.cluster import Cluster
from ppojob_operator.dashboard import Address, Dashboard, DashboardError
from ppojob_operator.job_events import JobEvents
from ppojob_operator.manifests.dashboard_secret import dashboard_token
from ppojob_operator.notifications import Notifier
from ppojob_operator.observer import Observer
from ppojob_operator.plan import Job, JobKey, Manifest, Observed, Plan, Surroundings
from ppojob_operator.reading import read_job, read_without_spec
from ppojob_operator.reconcile import (
    JobState,
    dashboard_target,
    decide,
    job_state,
    show_fault,
    show_refusal,
)
from ppojob_operator.report_times import ReportTimes
from ppojob_operator.served_namespaces import ServedNamespaces
from ppojob_operator.settings import DashboardAccess, Settings
from ppojob_operator.work_queue import WorkQueue, wait

logger = logging.getLogger(__name__)

_BURST = 0.2
"""Seconds between an event and the reconcile, because several events about one job usually come together."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_IDLE_TICK = 1.0
_REFUSALS = (ApiRefused, ApiFailed)
_TRIAL_SECONDS = 60.0
"""Of all dry runs of a layout. The rest of a pass needs time too (`pass_timeout`)."""
_TOLERATED_ERRORS = 3
"""Number of errors in a row from which on the status shows also those that usually pass by themselves."""


@dataclass(frozen=True)
class Hooks:
    """Callbacks for the probes and the metrics."""

    beat: Callable[[], None] = lambda: None
    """Called after each reconcile, and at least every second while a worker is idle."""
    observe_reconcile: Callable[[float, str], None] = lambda seconds, outcome: None
    """Called after each reconcile with its seconds and `ok`, `left`, `gone` or `error`."""
    count_submission: Callable[[], None] = lambda: None
    """Called after an attempt was submitted to Ray."""
    count_retries: Callable[[str, int], None] = lambda cause, count: None
    """Called with `user`, `infrastructure` or `ignored` and the number of retries that a status write added."""


class Loop:
    """The work queue, its workers, and the reconcile of one job."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        dashboard: Dashboard,
        surroundings: Callable[[JobKey], Surroundings],
        hooks: Hooks,
        notifier: Notifier | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._events = JobEvents(cluster)
        self._notifier = notifier or Notifier(settings)
        self._dashboard = dashboard
        self._surroundings = surroundings
        self._observer = Observer(cluster, surroundings)
        self._hooks = hooks
        self._clock = clock
        self._leading_since = clock()
        self._report_times = ReportTimes()
        self._queue = WorkQueue()
        self.namespaces = ServedNamespaces(settings, cluster, self._queue.add)
        own, patience = own_identity(settings), settings.take_over_after
        self._adopter = Adopter(cluster, own, patience, self.namespaces, self._queue.add)
        self._num_errors: dict[JobKey, int] = {}
        self._states: dict[JobKey, JobState] = {}
        self._watched: set[JobKey] = set()
        self._not_watched: set[JobKey] = set()

    def enqueue(self, key: JobKey) -> None:
        """Enqueue a job whose objects changed. The handlers of the watches call it."""
        self._watched.add(key)
        self._observer.drop(key)
        self._queue.add(key, _BURST)

    def requeue(self, key: JobKey) -> None:
        """Enqueue a job of which a notification is settled; nothing else has changed."""
        self._queue.add(key)

    @property
    def queue_depth(self) -> int:
        """Number of jobs that are due to be reconciled."""
        return len(self._queue)

    @property
    def num_left_alone(self) -> int:
        """Number of jobs that belong to another operator."""
        return self._adopter.num_left_alone

    def job_states(self) -> Mapping[JobKey, JobState]:
        """Return the state of each of our jobs after its last reconcile."""
        return dict(self._states)

    def watch_problem(self) -> str | None:
        """Return the problem if the watches do not report jobs that exist, else None."""
        missed = self._not_watched - self._watched
        if not missed:
            return None
        return f"the watch never reported {len(missed)} jobs that exist, such as {min(missed)}"

    async def run(self, stop: asyncio.Event) -> None:
        """Reconcile jobs until `stop` is set; reconciles in progress are finished first."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.namespaces.run(stop))
            for _ in range(self._settings.workers):
                tasks.create_task(self._work(stop))
            # A task for each namespace: one that cannot be listed does not delay the others.
            for namespace in self.namespaces.scopes:
                tasks.create_task(self._resync(namespace, stop))

    async def _work(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            key = await self._queue.take(_IDLE_TICK)
            if key is not None and not stop.is_set():
                with logs.about(key):
                    await self._reconcile_guarded(key)
            if key is not None:
                self._queue.done(key)
            self._hooks.beat()

    async def _resync(self, namespace: str, stop: asyncio.Event) -> None:
        """Enqueue a namespace's jobs at every `idle_interval`, which also finds changes that no watch reported."""
        found: set[JobKey] = set()
        while not await wait(stop, self._settings.idle_interval):
            try:
                listed = await self._cluster.list_jobs(namespace)
            except ApiError as error:
                logger.warning("the resync could not list the jobs: %s", error)
                continue
            keys = {JobKey(raw["metadata"]["namespace"], raw["metadata"]["name"]) for raw in listed}
            # A watch has one resync interval to report a job.
            self._not_watched, found = (self._not_watched - found) | (found & keys), keys
            for key in keys:
                self._observer.drop(key)
                self._queue.add(key)

    async def _reconcile_guarded(self, key: JobKey) -> None:
        """Reconcile a job; an error affects this job only."""
        began, outcome = monotonic(), "error"
        try:
            async with asyncio.timeout(self._settings.pass_timeout):
                outcome = await self.reconcile(key)
            self._num_errors.pop(key, None)
        except NamespaceTerminatingError as error:
            outcome = (
                "left"  # The job is deleted with the namespace. Until then, the watches and the resync enqueue it.
            )
            logger.info("%s: nothing is created for it any more: %s", key, error)
        except DashboardError as error:
            self._retry_later(key, str(error))
        except (ApiError, TimeoutError) as error:
            words = str(error) or f"the reconcile took more than {self._settings.pass_timeout:g} s"
            self._retry_later(key, words)
            # One request without an answer says nothing about the job; a refusal does, and so do several in a row.
            is_shown = isinstance(error, ApiError) and error.is_in_status
            is_lasting = isinstance(error, _REFUSALS) or self._num_errors[key] >= _TOLERATED_ERRORS
            if is_lasting and not is_shown:
                await self._show(key, partial(show_refusal, words=words))
        except Exception as error:  # A bug that one job triggers must not stop the other jobs.
            logger.exception("%s: bug in the operator", key)
            await self._show(key, partial(show_fault, error=error))
            self._retry_later(key, "see the exception above")
        self._hooks.observe_reconcile(monotonic() - began, outcome)

    async def _show(self, key: JobKey, explain: Callable[..., Plan]) -> None:
        """Write into the job's status, or at least into an Event, why its reconcile is not possible."""
        try:
            raw = await self._cluster.read_job(key)
            # The spec may be what cannot be read.
            job = None if raw is None else await self._adopter.adopt(read_without_spec(raw))
            if job is None:
                return
            plan = explain(job, now=self._clock())
            try:
                await self._write(job, plan)
            except ApiError as error:
                logger.warning("%s: the status cannot be written: %s", key, error)
                await self._events.write(job, plan.events)
        except ApiError as error:
            logger.warning("%s: neither status nor Event can be written: %s", key, error)
        except Exception:  # The same bug may prevent this write.
            logger.exception("%s: the bug could not be written into the status", key)

    def _retry_later(self, key: JobKey, message: str) -> None:
        self._observer.drop(key)
        count = self._num_errors[key] = self._num_errors.get(key, 0) + 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(count - 1, 10))
        logger.warning("%s: %s; retry in %g s", key, message, pause)
        self._queue.add(key, pause)

    async def reconcile(self, key: JobKey) -> str:
        """Reconcile a job once. Return `ok`, `gone` (it does not exist) or `left` (it is not ours).

        Raises:
            ApiError, DashboardError: the plan was not completed; reconcile again.
        """
        try:
            raw = await self._cluster.read_job(key)
        except ApiRefused as error:
            if not self._settings.watch_namespaces:
                raise
            # The namespace, or the operator's Role in it, was deleted. When it is back, the resync lists the job.
            logger.warning("%s: it is not reconciled any more, because it cannot be read: %s", key, error)
            self._drop(key)
            return "left"
        if raw is None:
            self._drop(key)
            return "gone"
        found = read_job(raw)
        logs.set_attempt(found.status.attempt)
        job = await self._adopter.adopt(found)
        if job is None:
            self._forget(key)
            return "left"
        job = await self._with_template(raw, job)
        observed = await self._observe(job)
        plan = decide(job, observed, self._clock())
        if plan.dry_run is not None:
            observed = await self._tried(observed, plan.dry_run)
            plan = decide(job, observed, self._clock())
        if plan.read_log_of:
            observed = replace(observed, log_tail=await self._read_log(job, observed, plan.read_log_of))
            plan = decide(job, observed, self._clock())
        await self._execute(job, observed, plan)
        self._observer.keep(job, observed, plan)
        self._states[key] = job_state(job, plan.status)
        if plan.requeue_after is not None:
            self._queue.add(key, plan.requeue_after)
        return "ok"

    async def _tried(self, observed: Observed, cluster: Manifest) -> Observed:
        """Try a RayCluster. Without an answer, the job is reconciled all the same: its trainer may have failed."""
        try:
            async with asyncio.timeout(_TRIAL_SECONDS):
                return replace(observed, dry_run=await self._cluster.dry_run(cluster))
        except TimeoutError:
            words = f"a dry run of its RayCluster and pods was not done after {_TRIAL_SECONDS:g} s"
        except ApiUnavailable as error:
            words = f"a dry run of its RayCluster and pods that was not answered: {error}"
        return replace(observed, dry_run=words, is_dry_run_unanswered=True)

    async def _with_template(self, raw: Manifest, job: Job) -> Job:
        """Return a job that is not accepted yet with the template that its spec names, if there is one."""
        if job.template_ref is None or job.template is not None:
            return job
        template = await self._cluster.read_template(job.template_ref, job.key.namespace)
        return job if template is None else replace(read_job(raw, template), status=job.status)

    def _drop(self, key: JobKey) -> None:
        self._forget(key)
        self._adopter.forget(key)
        self._watched.discard(key)
        # The watch is right not to report a job that is not there.
        self._not_watched.discard(key)

    def _forget(self, key: JobKey) -> None:
        self._states.pop(key, None)
        self._report_times.forget(key)
        self._num_errors.pop(key, None)
        self._observer.drop(key)
        self._events.forget(key)
        self._notifier.forget(key)

    async def _observe(self, job: Job) -> Observed:
        reported_at = self._report_times.seen(job, self._clock())
        found = await self._observer.objects(job)
        observed = replace(
            found,
            surroundings=self._surroundings(job.key),
            leading_since=self._leading_since,
            reported_at=reported_at,
        )
        address = self._address(job, observed)
        return observed if address is None else replace(observed, ray=await self._dashboard.list_jobs(address))

    def _address(self, job: Job, observed: Observed) -> Address | None:
        target = dashboard_target(job, observed)
        if target is None:
            return None
        is_by_service = self._settings.dashboard_access is DashboardAccess.SERVICE
        token = dashboard_token(observed.surroundings.dashboard_key, job.uid, target.cluster)
        return Address(target.service_url if is_by_service else target.pod_url, token)

    async def _read_log(self, job: Job, observed: Observed, submission_id: str) -> str:
        address = self._address(job, observed)
        assert address is not None
        assert observed.ray is not None
        ray_job = next(ray_job for ray_job in observed.ray.jobs if ray_job.submission_id == submission_id)
        return await self._dashboard.log_tail(address, ray_job)

    async def _execute(self, job: Job, observed: Observed, plan: Plan) -> None:
        try:
            await self._apply(job, observed, plan)
        except NamespaceTerminatingError:
            raise
        except (*_REFUSALS, DashboardError) as error:
            # The status shows the error too, because the user may be able to fix it.
            failed = decide(job, replace(observed, last_error=str(error)), self._clock())
            await self._write(job, replace(failed, apply=(), submission=None))
            if isinstance(error, ApiError):
                error.is_in_status = True
            raise
        if await self._write(job, plan):
            for name in plan.delete_secrets:
                await self._cluster.delete_secret(job.key.namespace, name)
            for name in plan.delete_clusters:
                await self._cluster.delete_cluster(job.key.namespace, name)
            if plan.delete_fetch_job:
                await self._cluster.delete_fetch_job(job.key)
            if plan.delete_job:
                await self._cluster.delete_job(job)

    async def _apply(self, job: Job, observed: Observed, plan: Plan) -> None:
        for manifest in plan.apply:
            await self._cluster.apply(manifest)
        for submission_id in plan.stop_submissions:
            await self._stop(job, observed, submission_id)
        if plan.submission is not None:
            address = self._address(job, observed)
            assert address is not None
            await self._dashboard.submit(address, plan.submission)
            self._hooks.count_submission()

    async def _stop(self, job: Job, observed: Observed, submission_id: str) -> None:
        """Ask Ray to stop an earlier attempt. If the request fails, the next reconcile repeats it; nothing waits."""
        address = self._address(job, observed)
        assert address is not None
        try:
            await self._dashboard.stop(address, submission_id)
        except DashboardError as error:
            logger.warning("%s: %s could not be stopped in Ray: %s", job.key, submission_id, error)

    async def _write(self, job: Job, plan: Plan) -> bool:
        """Write status and Events, and notify; False if the object was deleted or re-created."""
        plan = self._notifier.add(job, plan, self._clock())
        if plan.status is not None:
            if not await self._cluster.write_status(job, plan.status):
                self._queue.add(job.key)
                return False
            logger.info("%s: %s", job.key, plan.summary)
            self._count_retries(job, plan.status)
        self._notifier.send(job, plan)
        await self._events.write(job, plan.events)
        return True

    def _count_retries(self, job: Job, written: Mapping[str, Any]) -> None:
        before = job.status.retries or Retries()
        after = Retries.model_validate(written.get("retries", {}))
        for cause, count in (
            ("user", after.user - before.user),
            ("infrastructure", after.infrastructure - before.infrastructure),
            ("ignored", after.ignored - before.ignored),
        ):
            if count > 0:
                self._hooks.count_retries(cause, count)
