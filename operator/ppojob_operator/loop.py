"""The loop: which job needs a look, and the look itself: observe -> decide -> apply, one status write each.

        handlers (watches)        timers (look_again_after)        sweep (all jobs, every few minutes)
                 |                          |                              |
                 +----------> WorkQueue: one entry a job, never two looks at the same job
                                            |
                              workers: ours? (claims) -> observe (cluster, dashboard) -> reconcile.decide -> carry out

Between two looks at a job whose objects no watch told of, only the job itself and Ray's dashboard are asked again: a
thousand running jobs would otherwise list their pods a hundred times a second. The sweep distrusts the watches and has
everything read anew.

`main.py` runs it; `handlers` only note keys. An error of one job is written down, and the job is tried again after a
growing pause; it never stops the others.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import Retries
from ppojob_operator import logs
from ppojob_operator.api_server import ApiError, ApiFailed, ApiRefused
from ppojob_operator.claims import Claims, own_identity
from ppojob_operator.cluster import Cluster
from ppojob_operator.dashboard import Address, Dashboard, DashboardError
from ppojob_operator.manifests import naming
from ppojob_operator.manifests.dashboard_secret import dashboard_token
from ppojob_operator.plan import Job, JobKey, Manifest, Observed, Plan, Surroundings
from ppojob_operator.reconcile import (
    JobState,
    dashboard_target,
    decide,
    is_fetch_pod,
    is_finished,
    job_state,
    needs_fetch,
    read_claim,
    read_cluster,
    read_fetch_job,
    read_fetch_pod,
    read_job,
    read_pod,
    read_workload,
    show_fault,
    was_accepted,
)
from ppojob_operator.report_times import ReportTimes
from ppojob_operator.settings import DashboardAccess, Settings
from ppojob_operator.work_queue import WorkQueue, wait

logger = logging.getLogger(__name__)

_BURST = 0.2
"""Seconds that a note waits for others about the same job: an event rarely comes alone."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_IDLE_TICK = 1.0


@dataclass(frozen=True)
class Hooks:
    """What the loop tells the probes and the metrics."""

    beat: Callable[[], None] = lambda: None
    """Called at least every second while a worker has nothing to do, and after each look."""
    observe_look: Callable[[float, str], None] = lambda seconds, outcome: None
    """Called after each look with its seconds and `ok`, `left`, `gone` or `error`."""
    count_submission: Callable[[], None] = lambda: None
    """Called after Ray was given an attempt."""
    count_retries: Callable[[str, int], None] = lambda cause, count: None
    """Called with `user` or `infrastructure` and how many retries a written status has more than the one before."""


class Loop:
    """The queue, its workers, and the look at one job."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        dashboard: Dashboard,
        surroundings: Callable[[JobKey], Surroundings],
        hooks: Hooks,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._dashboard = dashboard
        self._surroundings = surroundings
        self._hooks = hooks
        self._clock = clock
        self._leading_since = clock()
        self._claims = Claims(cluster, own_identity(settings), settings.take_over_after)
        self._report_times = ReportTimes()
        self._queue = WorkQueue()
        self._num_errors: dict[JobKey, int] = {}
        self._states: dict[JobKey, JobState] = {}
        self._told: set[JobKey] = set()
        self._untold: set[JobKey] = set()
        self._kept: dict[JobKey, Observed | None] = {}
        """What the last look found; None: it is to be read anew. No entry: a watch has told of a change since."""

    def note(self, key: JobKey) -> None:
        """Note that a job needs a look. The handlers of the watches call it."""
        self._told.add(key)
        self._kept.pop(key, None)
        self._queue.add(key, _BURST)

    @property
    def queue_depth(self) -> int:
        """How many jobs wait for a look that is due."""
        return len(self._queue)

    @property
    def num_left_alone(self) -> int:
        """How many jobs are another operator's."""
        return self._claims.num_left_alone

    def job_states(self) -> Mapping[JobKey, JobState]:
        """Return our jobs as the last pass over each left them."""
        return dict(self._states)

    def watch_problem(self) -> str | None:
        """Return what is wrong if the watches do not tell of jobs that are there."""
        missed = self._untold - self._told
        if not missed:
            return None
        return f"the watch never told of {len(missed)} jobs that exist, such as {min(missed)}"

    async def run(self, stop: asyncio.Event) -> None:
        """Look at jobs until `stop` is set; looks in work are finished first."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._settings.workers):
                tasks.create_task(self._work(stop))
            tasks.create_task(self._sweep(stop))

    async def _work(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            key = await self._queue.take(_IDLE_TICK)
            if key is not None and not stop.is_set():
                with logs.about(key):
                    await self._guarded_look(key)
            if key is not None:
                self._queue.done(key)
            self._hooks.beat()

    async def _sweep(self, stop: asyncio.Event) -> None:
        """Ask for a look at every job from time to time: what no watch told of is found nevertheless."""
        found: set[JobKey] = set()
        while not await wait(stop, self._settings.idle_interval):
            try:
                listed = await self._cluster.list_jobs(self._settings.watch_namespace)
            except ApiError as error:
                logger.warning("the sweep could not list the jobs: %s", error)
                continue
            keys = {JobKey(raw["metadata"]["namespace"], raw["metadata"]["name"]) for raw in listed}
            # The watch had the time between two sweeps to tell of them.
            self._untold, found = found & keys, keys
            for key in keys:
                self._kept.pop(key, None)
                self._queue.add(key)

    async def _guarded_look(self, key: JobKey) -> None:
        """Look at a job; whatever goes wrong is this job's affair alone."""
        began, outcome = monotonic(), "error"
        try:
            async with asyncio.timeout(self._settings.pass_timeout):
                outcome = await self.look(key)
            self._num_errors.pop(key, None)
        except (ApiError, DashboardError) as error:
            self._try_again(key, str(error))
        except TimeoutError:
            self._try_again(key, f"the look took more than {self._settings.pass_timeout:g} s")
        except Exception as error:  # A fault of ours in one job's look must not end the looks at all others.
            logger.exception("%s: fault in the operator", key)
            await self._show_fault(key, error)
            self._try_again(key, "see the fault above")
        self._hooks.observe_look(monotonic() - began, outcome)

    async def _show_fault(self, key: JobKey, error: Exception) -> None:
        """Write into the job's status that this operator has a defect which keeps it from looking after the job."""
        try:
            raw = await self._cluster.read_job(key)
            job = None if raw is None else await self._claims.claim(read_job(raw))
            if job is not None:
                await self._write(job, show_fault(job, error, self._clock()))
        except Exception:  # The same defect may be in the way here.
            logger.exception("%s: the fault could not be shown in the status", key)

    def _try_again(self, key: JobKey, words: str) -> None:
        self._kept.pop(key, None)
        count = self._num_errors[key] = self._num_errors.get(key, 0) + 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(count - 1, 10))
        logger.warning("%s: %s; tried again in %g s", key, words, pause)
        self._queue.add(key, pause)

    async def look(self, key: JobKey) -> str:
        """Look at a job once and do what is to be done. Return `ok`; `gone`: there is none; `left`: it is another's.

        Raises:
            ApiError, DashboardError: something could not be done; the look is to be repeated.
        """
        raw = await self._cluster.read_job(key)
        if raw is None:
            self._forget(key)
            self._claims.forget(key)
            self._told.discard(key)
            # Deleted: that no watch reports it any more is no fault of the watch.
            self._untold.discard(key)
            return "gone"
        found = read_job(raw)
        logs.set_attempt(found.status.attempt)
        job = await self._claims.claim(found)
        if job is None:
            self._forget(key)
            return "left"
        observed = await self._observe(job)
        plan = decide(job, observed, self._clock())
        if plan.dry_run is not None:
            observed = replace(observed, dry_run=await self._cluster.dry_run(plan.dry_run))
            plan = decide(job, observed, self._clock())
        if plan.wanted_log:
            observed = replace(observed, log_tail=await self._read_log(job, observed, plan.wanted_log))
            plan = decide(job, observed, self._clock())
        await self._carry_out(job, observed, plan)
        self._keep(job, observed, plan)
        self._states[key] = job_state(job, plan.status)
        if plan.look_again_after is not None:
            self._queue.add(key, plan.look_again_after)
        return "ok"

    def _forget(self, key: JobKey) -> None:
        self._states.pop(key, None)
        self._report_times.forget(key)
        self._num_errors.pop(key, None)
        self._kept.pop(key, None)

    async def _observe(self, job: Job) -> Observed:
        reported_at = self._report_times.seen(job, self._clock())
        found = await self._objects(job)
        observed = replace(
            found,
            surroundings=self._surroundings(job.key),
            leading_since=self._leading_since,
            reported_at=reported_at,
        )
        address = self._address(job, observed)
        return observed if address is None else replace(observed, ray=await self._dashboard.look(address))

    async def _objects(self, job: Job) -> Observed:
        """Return the job's objects: read anew, but for those of an admitted job of which no watch told since."""
        kept = self._kept.get(job.key)
        if kept is not None and job.status.start_time is not None:
            # No watch tells of ConfigMap and Workloads; once there is a trainer, they can wait for the sweep.
            if job.status.submission_id is not None:
                return kept
            kept = replace(kept, config=await self._cluster.read_config(job.key))
            return await self._with_workloads(job, kept)
        # A watch that tells of a change from here on takes the entry away, and the result is not kept.
        self._kept[job.key] = None
        clusters = await self._cluster.list_clusters(job.key)
        observed = Observed(
            surroundings=self._surroundings(job.key),
            is_kuberay_served=clusters is not None,
            clusters=tuple(read_cluster(raw) for raw in clusters or () if naming.is_owned(raw, job.uid)),
        )
        if job.is_going or is_finished(job.status):
            return observed
        pods, config, claim, fetch_job = await asyncio.gather(
            self._cluster.list_pods(job.key),
            self._cluster.read_config(job.key),
            self._read_claim(job),
            self._read_fetch_job(job),
        )
        observed = replace(
            observed,
            claim=None if claim is None else read_claim(claim),
            pods=tuple(read_pod(raw) for raw in pods if not is_fetch_pod(raw)),
            fetch_job=None if fetch_job is None else read_fetch_job(fetch_job),
            fetch_pods=tuple(read_fetch_pod(raw) for raw in pods if is_fetch_pod(raw)),
            config=config,
        )
        return await self._with_workloads(job, observed)

    async def _with_workloads(self, job: Job, observed: Observed) -> Observed:
        """Add what Kueue says of a job with a queue."""
        if not isinstance(job.spec, PPOJobSpec) or job.spec.run_policy.queue_name is None:
            return observed
        owners = [cluster.uid for cluster in observed.clusters if cluster.uid]
        found = await self._cluster.list_workloads(job.key, owners)
        return replace(observed, workloads=None if found is None else tuple(read_workload(raw) for raw in found))

    def _keep(self, job: Job, observed: Observed, plan: Plan) -> None:
        """Keep what a look found for the next one, if the look itself changed nothing of it."""
        is_as_found = not (
            plan.apply or plan.submission or plan.delete_clusters or plan.delete_fetch_job or plan.delete_job
        )
        if job.key in self._kept:
            keeps = is_as_found and observed.is_kuberay_served and not is_finished(job.status)
            self._kept[job.key] = replace(observed, ray=None, log_tail=None) if keeps else None

    async def _read_claim(self, job: Job) -> Manifest | None:
        """Return the job's claim, which matters until the job is admitted."""
        if not isinstance(job.spec, PPOJobSpec) or was_accepted(job):
            return None
        return await self._cluster.read_claim(job.key.namespace, job.spec.storage.persistent_volume_claim)

    async def _read_fetch_job(self, job: Job) -> Manifest | None:
        """Return the Job that fetches, as long as it matters. Another owner's is none of ours: `apply` names it."""
        raw = await self._cluster.read_fetch_job(job.key) if needs_fetch(job) else None
        return raw if raw is not None and naming.is_owned(raw, job.uid) else None

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

    async def _carry_out(self, job: Job, observed: Observed, plan: Plan) -> None:
        try:
            await self._bring_forward(job, observed, plan)
        except (ApiRefused, ApiFailed, DashboardError) as error:
            # Said in the status too: the user can do something about it, or at least see it.
            told = decide(job, replace(observed, last_error=str(error)), self._clock())
            await self._write(job, replace(told, apply=(), submission=None))
            raise
        if await self._write(job, plan):
            for name in plan.delete_clusters:
                await self._cluster.delete_cluster(job.key.namespace, name)
            if plan.delete_fetch_job:
                await self._cluster.delete_fetch_job(job.key)
            if plan.delete_job:
                await self._cluster.delete_job(job)

    async def _bring_forward(self, job: Job, observed: Observed, plan: Plan) -> None:
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
        """Have Ray end an earlier attempt. If it cannot be asked, the next look asks again, and nothing waits."""
        address = self._address(job, observed)
        assert address is not None
        try:
            await self._dashboard.stop(address, submission_id)
        except DashboardError as error:
            logger.warning("%s: %s could not be ended in Ray: %s", job.key, submission_id, error)

    async def _write(self, job: Job, plan: Plan) -> bool:
        """Write status and Events; False if the object is gone, or another has its name."""
        if plan.status is not None:
            if not await self._cluster.write_status(job, plan.status):
                self._queue.add(job.key)
                return False
            logger.info("%s: %s", job.key, _summary(plan))
            self._count_retries(job, plan.status)
        for event in plan.events:
            await self._cluster.emit(job, event)
        return True

    def _count_retries(self, job: Job, written: Mapping[str, Any]) -> None:
        before = job.status.retries or Retries()
        after = Retries.model_validate(written.get("retries", {}))
        for cause, count in (
            ("user", after.user - before.user),
            ("infrastructure", after.infrastructure - before.infrastructure),
        ):
            if count > 0:
                self._hooks.count_retries(cause, count)


def _summary(plan: Plan) -> str:
    """Return one line about a status: phase, and the condition that was said last."""
    status = plan.status or {}
    words = "; ".join(f"{event.reason}: {event.message}" for event in plan.events)
    return f"{status.get('phase')} attempt {status.get('attempt', 0)} ready {status.get('ready', '-')} {words}".rstrip()
