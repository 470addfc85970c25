"""Input (`Observed`) and output (`Plan`) of `reconcile.decide`. Frozen data only.

`loop.py` observes and executes the plan; the policies in `reconcile` read the one and build the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import EffectivePool, PPOJobStatus
from ppojob_api.v1alpha1.template_reference import PinnedTemplate, TemplateRef
from ppojob_api.v1alpha1.validation import SpecError

Manifest = Mapping[str, Any]
"""An object of the API server as decoded JSON."""


class JobKey(NamedTuple):
    """Namespace and name of a PPOJob."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Return `namespace/name`, as kubectl users know it."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Job:
    """A PPOJob in the API server."""

    key: JobKey
    uid: str
    generation: int
    spec: PPOJobSpec | SpecError
    """The resolved spec, or what is wrong with it."""
    status: PPOJobStatus
    effective: PPOJobSpec | None = None
    """The resolved spec with the layout in force. None: no layout is in force, or it is no longer valid."""
    moved: tuple[EffectivePool, ...] = ()
    """Pools that autoBalance has resized; `spec` includes the new sizes."""
    is_deleting: bool = False
    """It is being deleted."""
    requested_owner: str | None = None
    """Value of the annotation that requests an operator. None: no annotation."""
    retry_request: str = ""
    """Value of the annotation that requests another run of a job that has ended. Empty: no annotation."""
    adopted_uid: str | None = None
    """Value of the annotation that adopts the checkpoints of an earlier run. None: no annotation."""
    queue_label: str | None = None
    """Value of the label that names a queue of Kueue, as it is now. None: no label."""
    template_ref: TemplateRef | None = None
    """The template that the spec names. None: it names none."""
    template: PinnedTemplate | None = None
    """The template that completes the spec. None: the spec names none, or it was not found."""
    ttl_seconds_after_finished: int | None = None
    """That of the run policy, also if the rest of the spec is invalid. None: the finished job is never deleted."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Status fields of a newer operator that this version does not know; they are kept."""


@dataclass(frozen=True)
class OtherLease:
    """The observed Lease of another operator."""

    unchanged_for: float
    """Seconds from its last observed change, or the first read, to the last read, by our clock."""
    duration: float
    """Seconds for which its holder leads after a renewal."""


@dataclass(frozen=True)
class Trouble:
    """Why a pod or container is not ready, or was lost."""

    reason: str
    """One of `constants.Reason`."""
    message: str
    """The message of the scheduler, the kubelet or KubeRay."""
    container: str = ""
    """The affected container. Empty: the pod as a whole."""
    exit_code: int | None = None
    """Exit code of that container, if it has ended."""


@dataclass(frozen=True)
class Pod:
    """A Ray pod of the job."""

    name: str
    cluster: str
    """RayCluster of the pod."""
    pool: str | None
    """Its pool. None: it is the head."""
    is_ready: bool = False
    is_deleting: bool = False
    """It is being deleted."""
    is_over: bool = False
    """All its containers have ended for good, so that it holds no GPUs any more."""
    address: str = ""
    """Its IP address. Empty: not assigned yet."""
    node: str = ""
    """Its node. Empty: it is not scheduled yet."""
    created: datetime | None = None
    """creationTimestamp, by the API server's clock."""
    scheduled: datetime | None = None
    """When it was bound to its node, by the scheduler's clock. None: it is not scheduled yet."""
    trouble: Trouble | None = None
    out_of_memory: Trouble | None = None
    """Its container that exceeded its memory limit, even if that was restarted."""
    disruption: Trouble | None = None
    """Why it is being evicted, or that its node does not respond. Its containers may still run."""


@dataclass(frozen=True)
class Cluster:
    """A RayCluster of the job."""

    name: str
    is_deleting: bool = False
    """It is being deleted."""
    is_suspended: bool = False
    """`spec.suspend` is true: KubeRay deletes its pods."""
    created: datetime | None = None
    """creationTimestamp, by the API server's clock."""
    problem: str = ""
    """KubeRay's message if it cannot create the pods. Empty: no problem."""
    head_service: str = ""
    """Service of the head. Empty: KubeRay has not created it yet."""
    uid: str = ""
    generation: int = 1
    """`metadata.generation`; above 1, the spec was edited."""
    spec: Manifest = field(default_factory=dict)
    """Its live spec."""
    created_from: str | None = None
    """Digest of the spec that it was created from. None: it has no such annotation."""
    queue: str | None = None
    """Kueue's LocalQueue in its label, which Kueue writes for its default queue. None: it has no such label."""
    managed_by: str | None = None
    """`spec.managedBy`: who creates its pods. None: KubeRay."""


@dataclass(frozen=True)
class Workload:
    """Kueue's Workload of a RayCluster."""

    owner: str
    """UID of the RayCluster."""
    waits_for: str = ""
    """Kueue's message why it has no quota. Empty: it has quota, or Kueue has not processed it yet."""
    eviction: str = ""
    """Kueue's message why it was evicted. Empty: it was not, or it was admitted again since."""


@dataclass(frozen=True)
class FetchJob:
    """The batch/v1 Job that fetches the job's models and data."""

    created_from: str | None = None
    """Digest of the spec that it was created from. None: it has no such annotation."""
    created: datetime | None = None
    """creationTimestamp, by the API server's clock."""
    is_deleting: bool = False
    """It is being deleted."""
    is_suspended: bool = False
    """`spec.suspend` is true, which only Kueue sets."""
    queue: str | None = None
    """Kueue's LocalQueue in its label. None: it has no such label."""
    is_complete: bool = False
    failure: str | None = None
    """Kubernetes' message why it has failed permanently. None: it has not failed."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.is_complete or self.failure is not None


@dataclass(frozen=True)
class FetchPod:
    """A pod of that Job."""

    name: str
    created: datetime | None = None
    has_started: bool = False
    """Its container runs, or has run."""
    failure: str = ""
    """The message with which its container has failed. Empty: it has not failed."""
    trouble: str = ""
    """Message of the scheduler or the kubelet why its container does not start. Empty: none."""
    has_image_trouble: bool = False
    """That message is about an image that cannot be pulled."""


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim."""

    name: str
    phase: str
    """Pending, Bound or Lost."""
    access_modes: tuple[str, ...] = ()
    """Those of its volume; until it is bound, those that it requests."""


class RayState(StrEnum):
    """Ray's states of a job."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


ALIVE = (RayState.PENDING, RayState.RUNNING)
"""States of a job that is pending or running."""


@dataclass(frozen=True)
class RayJob:
    """A submission as Ray's dashboard knows it."""

    submission_id: str
    state: RayState
    message: str = ""
    error_type: str = ""
    """Ray's JobErrorType; empty: none."""
    exit_code: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the submission."""
    node_id: str = ""
    """Ray node of the driver. Empty: not known yet."""


@dataclass(frozen=True)
class Ray:
    """The response of Ray's dashboard."""

    jobs: tuple[RayJob, ...] = ()
    problem: str = ""
    """Why the request failed. Empty: it succeeded."""


@dataclass(frozen=True)
class JobNetwork:
    """Who may reach a job's pods, besides the pods themselves."""

    namespace: str
    """The operator's namespace."""
    operator_labels: Mapping[str, str]
    """Labels of the operator's pods."""
    metrics_namespace: str = ""
    """Namespace whose pods may scrape metrics. Empty: none."""


@dataclass(frozen=True)
class Surroundings:
    """What the operator adds to a job: addresses, certificates and keys."""

    report_url: str
    """Where the job's trainer reports its progress."""
    ca_bundle: str
    """Certificate authority of that address, as PEM."""
    dashboard_key: bytes = field(repr=False)
    """Key from which the tokens of Ray's dashboards are derived."""
    network: JobNetwork | None = None
    """Who may reach the job's pods. None: the operator creates no NetworkPolicy."""


@dataclass(frozen=True)
class Observed:
    """Everything that a reconcile has observed."""

    surroundings: Surroundings
    leading_since: datetime | None = None
    """When this replica became the leader. Before, reports may be lost and no job reconciled. None: it has always
    led."""
    is_kuberay_served: bool = True
    """Whether the API server serves KubeRay's RayCluster."""
    claim: Claim | None = None
    """The PersistentVolumeClaim that `spec.storage` names. None: it does not exist, or was not read."""
    clusters: tuple[Cluster, ...] = ()
    pods: tuple[Pod, ...] = ()
    fetch_job: FetchJob | None = None
    """The Job that fetches models and data. None: there is none, or nothing is to be fetched."""
    fetch_pods: tuple[FetchPod, ...] = ()
    workloads: tuple[Workload, ...] | None = ()
    """Those of the RayClusters, if Kueue may manage them. None: the API server does not serve Kueue's Workload."""
    config: Mapping[str, str] | None = None
    """Data of the job's ConfigMap."""
    ray: Ray | None = None
    """None: not requested, because no head is ready."""
    log_tail: str | None = None
    """Last lines of the driver's log. None: not read."""
    reported_at: datetime | None = None
    """When the report in the status last changed, by the clock of the loop. None: there is no report."""
    last_error: str = ""
    """Error of the last reconcile of this job. Empty: none."""
    dry_run: str | None = None
    """Why the API server rejects the new layout's RayCluster or pods. Empty: it accepts them. None: not tried."""
    is_dry_run_unanswered: bool = False
    """It did not answer; `dry_run` says how."""


@dataclass(frozen=True)
class Submission:
    """A job to submit to Ray."""

    submission_id: str
    entrypoint: str
    environment: Mapping[str, str]
    metadata: Mapping[str, str]
    cluster: str
    """RayCluster to submit it to."""


@dataclass(frozen=True)
class EventRecord:
    """An Event about the job."""

    reason: str
    """One of `constants.Reason`."""
    message: str
    is_warning: bool
    action: str
    """Action of the Event: the type of the condition that changed."""


@dataclass(frozen=True)
class Plan:
    """What to do, in this order: apply, stop, submit, write the status, delete, emit."""

    apply: tuple[Manifest, ...] = ()
    stop_submissions: tuple[str, ...] = ()
    """Submissions of earlier attempts that Ray still runs."""
    submission: Submission | None = None
    status: Mapping[str, Any] | None = None
    """The complete operator's part of the status. None: unchanged."""
    delete_secrets: tuple[str, ...] = ()
    """Secrets of RayClusters that are deleted, by this plan or by another client."""
    delete_clusters: tuple[str, ...] = ()
    """RayClusters to delete."""
    delete_fetch_job: bool = False
    """The Job that fetches models and data must not run any longer."""
    delete_job: bool = False
    """Delete the PPOJob: its ttlSecondsAfterFinished has passed."""
    events: tuple[EventRecord, ...] = ()
    dry_run: Manifest | None = None
    """RayCluster to apply with its pods as a dry run, before anything else. None: none."""
    read_log_of: str = ""
    """Submission whose log `decide` needs, before anything else. Empty: none."""
    state: str = ""
    """State of the job at the beginning, one of `reconcile.states.State`. Empty: an observation is missing."""
    event: str = ""
    """Event that decides what happens, one of `reconcile.states.Event`. Empty: the reconcile was not possible."""
    next_state: str = ""
    """State of the job when the status is written."""
    requeue_after: float | None = None
    """Seconds until the next reconcile, if no watch triggers it earlier. None: none is scheduled."""

    @property
    def summary(self) -> str:
        """One line for the log: transition, attempt, ready GPUs and the Events."""
        status, events = self.status or {}, "; ".join(f"{event.reason}: {event.message}" for event in self.events)
        change = f"{self.state} --{self.event or 'NotReconciled'}--> {self.next_state}"
        summary = f"{change}, attempt {status.get('attempt', 0)} ready {status.get('ready', '-')} {events}"
        return summary.rstrip()
