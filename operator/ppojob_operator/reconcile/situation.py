"""One look at a job, as the policies ask about it: the job, what was observed, and the time.

Every policy is a function of a `Situation`. It answers from the status what was decided before (which attempt, since
when) and from the observation what is so now.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import ConditionStatus, PPOJobStatus, StopStatus
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Cluster, Job, Observed, Pod, RayJob
from ppojob_operator.reconcile.reading import parse_time

_NEWLINE = "\n"
_HEADLINE_LENGTH = 500
_FIRST_BACKOFF = timedelta(seconds=10)
_LONGEST_BACKOFF = timedelta(seconds=360)


@dataclass(frozen=True)
class Finding:
    """What a policy says of one condition."""

    status: str
    """True, False or Unknown."""
    reason: str
    message: str


@dataclass(frozen=True)
class Failure:
    """Why an attempt is over."""

    kind: FailureKind
    """Whom it is counted against."""
    reason: str
    message: str
    exit_code: int | None = None
    is_cluster_suspect: bool = True
    """The next attempt gets a new RayCluster; False: the pods are warm, and KubeRay makes the lost ones anew."""

    @property
    def headline(self) -> str:
        """Reason and first line of the message, for sentences; the whole message is in status.lastFailure."""
        return f"{self.reason}: {self.message.strip().partition(_NEWLINE)[0][:_HEADLINE_LENGTH]}"


@dataclass(frozen=True)
class Situation:
    """One look at a job that can be run."""

    job: Job
    spec: PPOJobSpec
    """The spec with the layout in force."""
    observed: Observed
    now: datetime
    desired: PPOJobSpec | None = None
    """The spec as it stands. None: it cannot be run."""
    refusal: str = ""
    """Why the spec as it stands cannot be run; empty: it can."""

    @property
    def status(self) -> PPOJobStatus:
        """The status as it stands."""
        return self.job.status

    @property
    def attempt(self) -> int:
        """Number of the current attempt."""
        return self.status.attempt or 0

    @property
    def start_time(self) -> datetime:
        """When the job was admitted, or went on after a suspension or a queue: now, if that is only just happening."""
        return parse_time(self.status.start_time) if self._was_active else self.now

    @property
    def active_time(self) -> timedelta:
        """For how long the job was active in all: it stands still while the job is suspended or queued."""
        since = max(timedelta(0), self.now - self.start_time)
        return timedelta(seconds=self.status.active_seconds or 0) + since

    @property
    def _was_active(self) -> bool:
        """Whether the job was active at the last look: admitted, and neither suspended nor in its queue."""
        suspended, admitted = self.condition(Condition.SUSPENDED), self.condition(Condition.ADMITTED)
        is_suspended = suspended is not None and suspended.status == "True"
        is_queued = admitted is not None and admitted.reason == Reason.QUEUED
        return self.status.start_time is not None and not is_suspended and not is_queued

    @property
    def has_run(self) -> bool:
        """Whether some attempt was ever sent to Ray: then there is something to go on from, and to lose."""
        status, stop = self.status, self.status.stop
        was_stopped = stop is not None and stop.reason in (Reason.SUSPENDING, Reason.PREEMPTED)
        return was_stopped or status.progress is not None or status.last_failure is not None

    @property
    def cluster_name(self) -> str:
        """The RayCluster of the current attempt, which may have to be made."""
        if self.status.ray_cluster is not None:
            return self.status.ray_cluster.name
        return self.own_cluster_name

    @property
    def own_cluster_name(self) -> str:
        """The RayCluster that is made for the current attempt, where it does not go on in an earlier one's."""
        secret = self.observed.surroundings.dashboard_key
        return naming.cluster_name(self.job.key.name, self.job.uid, self.attempt, secret)

    @cached_property
    def cluster(self) -> Cluster | None:
        """The RayCluster of the current attempt, if it is there to stay."""
        return next((c for c in self.observed.clusters if c.name == self.cluster_name and not c.is_deleting), None)

    @cached_property
    def pods(self) -> tuple[Pod, ...]:
        """The pods of that RayCluster which are there to stay."""
        return tuple(pod for pod in self.observed.pods if pod.cluster == self.cluster_name and not pod.is_deleting)

    @property
    def leaving_pods(self) -> tuple[Pod, ...]:
        """The pods that are on their way out, most of them of an earlier attempt's RayCluster."""
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
        """The current attempt as Ray knows it; None where it does not, or was not asked."""
        jobs = self.observed.ray.jobs if self.observed.ray else ()
        return next((job for job in jobs if job.submission_id == self.submission_id), None)

    @property
    def submitted_at(self) -> datetime | None:
        """When the current attempt was sent to Ray; None: not yet."""
        submitted = self.condition(Condition.SUBMITTED)
        if submitted is not None and submitted.status == "True":
            return parse_time(submitted.last_transition_time)
        return self.now if self.ray_job is not None else None

    @property
    def reported_at(self) -> datetime | None:
        """When the trainer of the current attempt was seen to report last; None: not yet."""
        progress = self.status.progress
        is_of_this = self.submitted_at is not None and progress is not None and progress.attempt == self.attempt
        return self.observed.reported_at if is_of_this else None

    @property
    def unreachable_since(self) -> datetime | None:
        """When Ray's dashboard ceased to answer for the attempt that was sent to it; None: it answers."""
        ray, cluster = self.observed.ray, self.status.ray_cluster
        if self.submitted_at is None or (ray is not None and not ray.problem):
            return None
        since = cluster.unreachable_since if cluster is not None else None
        return parse_time(since) if since is not None else self.now

    @property
    def due(self) -> datetime:
        """When the current attempt may begin: after a failure there is a growing pause, after a stop in order none."""
        failure, stop, due = self.status.last_failure, self.status.stop, self.start_time
        if self.attempt > 0 and failure is not None and failure.attempt == self.attempt - 1:
            due = max(due, parse_time(failure.time) + backoff(self.status.retries.total if self.status.retries else 1))
        if self.attempt > 0 and stop is not None and stop.attempt == self.attempt - 1 and stop.completion_time:
            due = max(due, parse_time(stop.completion_time))
        return due

    @property
    def open_stop(self) -> StopStatus | None:
        """The stop in order that the current attempt was asked for and that is waited for; None: there is none."""
        stop = self.status.stop
        return stop if stop is not None and stop.attempt == self.attempt and stop.completion_time is None else None

    def condition(self, kind: str) -> ConditionStatus | None:
        """Return a condition as it stands in the status."""
        return next((condition for condition in self.status.conditions if condition.type == kind), None)

    def age_of(self, kind: str, status: str) -> timedelta:
        """Return for how long a condition has had this status; nothing, if it has not."""
        condition = self.condition(kind)
        if condition is None or condition.status != status:
            return timedelta(0)
        return self.now - parse_time(condition.last_transition_time)


def backoff(retries: int) -> timedelta:
    """Return the pause before a retry: 10 s, doubled with each, at most six minutes, as batch/v1 Job has it."""
    return min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(retries - 1, 10)) if retries > 0 else timedelta(0)
