"""The input of the policies: a job, what was observed, and the time.

Every policy is a function of a `Situation`. Earlier decisions, such as the attempt, come from the status; the current
state comes from the observation.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import ConditionStatus, PPOJobStatus, StopStatus
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Cluster, Job, Observed, Pod, RayJob
from ppojob_operator.times import parse_time

_NEWLINE = "\n"
_HEADLINE_LENGTH = 500
_AFTER_A_RUN = (Reason.SUSPENDING, Reason.PREEMPTED, Reason.PODS_RELEASED)
"""Reasons of stops that only a job gets that has run."""
_FIRST_BACKOFF = timedelta(seconds=10)
_LONGEST_BACKOFF = timedelta(seconds=360)


@dataclass(frozen=True)
class Finding:
    """A policy's value of one condition."""

    status: str
    """True, False or Unknown."""
    reason: str
    message: str


@dataclass(frozen=True)
class Failure:
    """Why an attempt has failed."""

    kind: FailureKind
    """The cause, which decides whether a retry may help."""
    reason: str
    message: str
    exit_code: int | None = None
    is_cluster_suspect: bool = True
    """The next attempt gets a new RayCluster. False: it reuses the pods, and KubeRay re-creates lost ones."""
    address: str | None = None
    """IP address of the pod whose GPU has failed. None: another failure."""
    role: str | None = None
    """Role of the process that failed, or name of a user's worker. None: unknown."""

    @property
    def headline(self) -> str:
        """Reason and first line of the message; status.lastFailure has the whole message."""
        return f"{self.reason}: {self.message.strip().partition(_NEWLINE)[0][:_HEADLINE_LENGTH]}"


@dataclass(frozen=True)
class Situation:
    """An accepted job, what was observed, and the time."""

    job: Job
    spec: PPOJobSpec
    """The spec with the layout in force."""
    observed: Observed
    now: datetime
    desired: PPOJobSpec | None = None
    """The spec of the object. None: it cannot be run."""
    refusal: str = ""
    """Why the spec of the object cannot be run. Empty: it can."""

    @property
    def status(self) -> PPOJobStatus:
        """The status of the object."""
        return self.job.status

    @property
    def attempt(self) -> int:
        """Number of the current attempt."""
        return self.status.attempt or 0

    @property
    def start_time(self) -> datetime:
        """When the job started, or resumed after a suspension or a queue; now, if it has not started."""
        return parse_time(self.status.start_time) if self._was_active else self.now

    @property
    def active_time(self) -> timedelta:
        """Total active time of the job, without the time in which it was suspended or queued."""
        since = max(timedelta(0), self.now - self.start_time)
        return timedelta(seconds=self.status.active_seconds or 0) + since

    @property
    def _was_active(self) -> bool:
        """Whether the job was active at the last reconcile: started, and neither suspended nor queued."""
        suspended, admitted = self.condition(Condition.SUSPENDED), self.condition(Condition.ADMITTED)
        is_suspended = suspended is not None and suspended.status == "True"
        is_queued = admitted is not None and admitted.reason == Reason.QUEUED
        return self.status.start_time is not None and not is_suspended and not is_queued

    @property
    def has_run(self) -> bool:
        """Whether any attempt has run, so that there may be a checkpoint to resume from."""
        status, stop = self.status, self.status.stop
        was_stopped = stop is not None and stop.reason in _AFTER_A_RUN
        return was_stopped or status.progress is not None or status.last_failure is not None

    @property
    def cluster_name(self) -> str:
        """Name of the current attempt's RayCluster, which may not exist yet."""
        if self.status.ray_cluster is not None:
            return self.status.ray_cluster.name
        return self.own_cluster_name

    @property
    def own_cluster_name(self) -> str:
        """Name of the current attempt's RayCluster if it does not reuse an earlier one's."""
        return self._cluster_name_of(self.attempt)

    def _cluster_name_of(self, attempt: int) -> str:
        secret = self.observed.surroundings.dashboard_key
        return naming.cluster_name(self.job.key.name, self.job.uid, attempt, secret)

    def is_cluster_young(self, attempts: int) -> bool:
        """Return whether the RayCluster was created for one of the last attempts, the current one included."""
        return any(self._cluster_name_of(self.attempt - age) == self.cluster_name for age in range(attempts))

    @property
    def avoided_nodes(self) -> tuple[str, ...]:
        """Nodes that the pods of the current attempt's RayCluster avoid. They are fixed when it is created."""
        if self.status.ray_cluster is not None:
            return tuple(self.status.ray_cluster.avoided_nodes or ())
        return tuple(node.name for node in self.status.avoided_nodes)

    @cached_property
    def cluster(self) -> Cluster | None:
        """The RayCluster of the current attempt, unless it is being deleted."""
        return next((c for c in self.observed.clusters if c.name == self.cluster_name and not c.is_deleting), None)

    @cached_property
    def pods(self) -> tuple[Pod, ...]:
        """The pods of that RayCluster, without those that are being deleted."""
        return tuple(pod for pod in self.observed.pods if pod.cluster == self.cluster_name and not pod.is_deleting)

    @property
    def leaving_pods(self) -> tuple[Pod, ...]:
        """Pods that are being deleted, and those of an earlier attempt's RayCluster."""
        return tuple(pod for pod in self.observed.pods if pod.cluster != self.cluster_name or pod.is_deleting)

    @property
    def head(self) -> Pod | None:
        """The head pod, if there is one."""
        return next((pod for pod in self.pods if pod.pool is None), None)

    def pod_names(self, pool: str) -> tuple[str, ...]:
        """Return the names of a pool's pods that are ready."""
        return tuple(pod.name for pod in self.pods if pod.pool == pool and pod.is_ready)

    @property
    def submission_id(self) -> str:
        """Ray's id of the current attempt."""
        return naming.submission_id(self.job.uid, self.attempt)

    @cached_property
    def ray_job(self) -> RayJob | None:
        """Ray's job of the current attempt; None: Ray does not know it, or was not contacted."""
        return _ray_job(self.job, self.observed)

    @property
    def submitted_at(self) -> datetime | None:
        """When the current attempt was submitted to Ray; None: not yet."""
        submitted = self.condition(Condition.SUBMITTED)
        if submitted is not None and submitted.status == "True":
            return parse_time(submitted.last_transition_time)
        return self.now if self.ray_job is not None else None

    @property
    def reported_at(self) -> datetime | None:
        """When the last report of the current attempt's trainer was seen; None: it has not reported."""
        progress = self.status.progress
        is_of_this = self.submitted_at is not None and progress is not None and progress.attempt == self.attempt
        return self.observed.reported_at if is_of_this else None

    @property
    def unreachable_since(self) -> datetime | None:
        """Since when the dashboard of a submitted attempt does not respond; None: it responds."""
        ray, cluster = self.observed.ray, self.status.ray_cluster
        if self.submitted_at is None or (ray is not None and not ray.problem):
            return None
        since = cluster.unreachable_since if cluster is not None else None
        return parse_time(since) if since is not None else self.now

    @property
    def due(self) -> datetime:
        """When the current attempt may start: at once, or after a failure's backoff, or a pause."""
        failure, stop, due = self.status.last_failure, self.status.stop, self.start_time
        if self.attempt > 0 and failure is not None and failure.attempt == self.attempt - 1:
            failures = self.status.retries.since_progress if self.status.retries else 0
            due = max(due, parse_time(failure.time) + backoff(max(1, failures)))
        if self.attempt > 0 and stop is not None and stop.attempt == self.attempt - 1 and stop.completion_time:
            due = max(due, parse_time(stop.completion_time) + self._pause(stop))
        return due

    def _pause(self, stop: StopStatus) -> timedelta:
        """Return the time between a stop and the next attempt; after a release of pods, it differs between jobs."""
        if stop.reason != Reason.PODS_RELEASED:
            return timedelta(0)
        share = hashlib.sha256(f"{self.job.uid}/{stop.attempt}".encode()).digest()[0] / 256
        return share * timedelta(seconds=self.spec.run_policy.partial_pods_timeout_seconds)

    @property
    def open_stop(self) -> StopStatus | None:
        """The current attempt's graceful stop, if it was requested and has not completed."""
        stop = self.status.stop
        return stop if stop is not None and stop.attempt == self.attempt and stop.completion_time is None else None

    def condition(self, kind: str) -> ConditionStatus | None:
        """Return a condition of the status."""
        return next((condition for condition in self.status.conditions if condition.type == kind), None)

    def age_of(self, kind: str, status: str) -> timedelta:
        """Return for how long a condition has had this status; 0 if its status differs."""
        condition = self.condition(kind)
        if condition is None or condition.status != status:
            return timedelta(0)
        return self.now - parse_time(condition.last_transition_time)


def backoff(failures: int) -> timedelta:
    """Return the delay before a retry: 10 s, doubled with each failure, at most six minutes, as in batch/v1 Job.

    failures: number of failures since the last progress, from 1. Those that count against no limit are included, so
    that a node on which every attempt ends does not cause a loop at full speed.
    """
    pause: timedelta = _FIRST_BACKOFF * 2 ** min(failures - 1, 10)
    return min(_LONGEST_BACKOFF, pause)


def is_submitted(job: Job, observed: Observed) -> bool:
    """Return whether the trainer of the current attempt was submitted to Ray; the status may not say so yet."""
    conditions = job.status.conditions
    is_written = any((each.type, each.status) == (Condition.SUBMITTED, "True") for each in conditions)
    return is_written or _ray_job(job, observed) is not None


def _ray_job(job: Job, observed: Observed) -> RayJob | None:
    submission_id = naming.submission_id(job.uid, job.status.attempt or 0)
    jobs = observed.ray.jobs if observed.ray else ()
    return next((each for each in jobs if each.submission_id == submission_id), None)
