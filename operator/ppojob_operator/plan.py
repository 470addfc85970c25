"""What a look at a job sees (`Observed`) and what comes of it (`Plan`): the two ends of `reconcile.decide`.

`loop.py` fills in the one and carries out the other. Nothing here does anything: frozen data only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import EffectivePool, PPOJobStatus
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
    """A PPOJob as the API server has it."""

    key: JobKey
    uid: str
    generation: int
    spec: PPOJobSpec | SpecError
    """The resolved spec, or what is wrong with it."""
    status: PPOJobStatus
    effective: PPOJobSpec | None = None
    """The resolved spec with the layout that is in force; None: none is, or it cannot be run (any more)."""
    moved: tuple[EffectivePool, ...] = ()
    """What autoBalance has moved; `spec` has it already."""
    is_going: bool = False
    """It is being deleted."""
    operator_wish: str | None = None
    """Value of the annotation that names the operator which is to run it. None: there is none."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """What a newer operator wrote into the status that this one does not know; it stays there."""


@dataclass(frozen=True)
class OtherLease:
    """What was seen of the Lease of another operator."""

    unchanged_for: float
    """Seconds from when it was seen to change, or seen at all, to the last look at it, by our own clock."""
    duration: float
    """Seconds for which its holder leads after a renewal."""


@dataclass(frozen=True)
class Trouble:
    """Why something is not as it should be."""

    reason: str
    """One of `constants.Reason`."""
    words: str
    """In the words of whoever found it: the scheduler, the kubelet, KubeRay."""
    container: str = ""
    """The container that it is about; empty: the pod as a whole."""
    exit_code: int | None = None
    """Exit code of that container, if it has ended."""


@dataclass(frozen=True)
class Pod:
    """A Ray pod of the job."""

    name: str
    cluster: str
    """RayCluster that it belongs to."""
    pool: str | None
    """Its pool; None is the head."""
    is_ready: bool = False
    is_going: bool = False
    """It is being deleted."""
    address: str = ""
    """Its IP address, once it has one."""
    created: datetime | None = None
    """When it was made, by the API server's clock."""
    trouble: Trouble | None = None
    out_of_memory: Trouble | None = None
    """Its container that was killed for want of memory, even if that runs again."""
    disruption: Trouble | None = None
    """Who takes it away, or that its node does not answer: its containers may run meanwhile."""


@dataclass(frozen=True)
class Cluster:
    """A RayCluster of the job."""

    name: str
    is_going: bool = False
    """It is being deleted."""
    is_suspended: bool = False
    """Somebody suspended it: KubeRay deletes its pods."""
    created: datetime | None = None
    """When it was made, by the API server's clock."""
    problem: str = ""
    """KubeRay's words where it cannot make the pods; empty: none."""
    head_service: str = ""
    """Service of the head, once KubeRay made it."""
    uid: str = ""
    generation: int = 1
    """How often its spec was written."""
    spec: Manifest = field(default_factory=dict)
    """Its spec as it stands."""
    made_of: str | None = None
    """Digest of the spec that it was made with. None: it does not say so."""


@dataclass(frozen=True)
class Workload:
    """What Kueue keeps of a RayCluster in a queue."""

    owner: str
    """UID of the RayCluster."""
    waits_for: str = ""
    """Kueue's words on why it has no quota; empty: it has, or Kueue has not looked yet."""
    eviction: str = ""
    """Kueue's words on why the quota was taken away; empty: it was not, or the RayCluster was let in again since."""


@dataclass(frozen=True)
class FetchJob:
    """The batch/v1 Job that fetches the job's models and data."""

    made_of: str | None = None
    """Digest of the spec that it was created from. None: it does not say so."""
    created: datetime | None = None
    """When it was created, by the API server's clock."""
    is_going: bool = False
    """It is being deleted."""
    is_complete: bool = False
    failure: str | None = None
    """Kubernetes' words on why it has failed for good. None: it has not."""

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
    last_words: str = ""
    """Why its container has failed, in its own words; empty: it has not failed."""
    trouble: str = ""
    """Why its container does not start, in the words of scheduler or kubelet."""


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim."""

    name: str
    phase: str
    """Pending, Bound or Lost."""
    access_modes: tuple[str, ...] = ()
    """Those of its volume, or while it has none, those that it asks for."""


class RayState(StrEnum):
    """States of a job in Ray's own words."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


ALIVE = (RayState.PENDING, RayState.RUNNING)
"""States of a job that has not ended."""


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
    """What was sent along with it."""
    node_id: str = ""
    """Ray's node that the driver runs on; empty: not yet known."""


@dataclass(frozen=True)
class Ray:
    """What Ray's dashboard said."""

    jobs: tuple[RayJob, ...] = ()
    problem: str = ""
    """Why it did not answer; empty: it did."""


@dataclass(frozen=True)
class JobNetwork:
    """Who besides a job's own pods may reach them."""

    namespace: str
    """The operator's namespace."""
    operator_labels: Mapping[str, str]
    """Labels of the operator's pods."""
    metrics_namespace: str = ""
    """Namespace whose pods may scrape metrics. Empty: none."""


@dataclass(frozen=True)
class Surroundings:
    """The operator's own part in a job."""

    report_url: str
    """Where the job's trainer reports its progress."""
    ca_bundle: str
    """Certificate authority of that address, as PEM."""
    dashboard_key: bytes = field(repr=False)
    """Key from which the tokens of Ray's dashboards are made."""
    network: JobNetwork | None = None
    """Who may reach the job's pods. None: whoever the cluster lets."""


@dataclass(frozen=True)
class Observed:
    """All that one look at a job saw."""

    surroundings: Surroundings
    leading_since: datetime | None = None
    """When this operator took the lead: before it, there may have been nobody to take reports or to look. None: it has
    always led."""
    is_kuberay_served: bool = True
    """Whether the API server knows KubeRay's RayCluster."""
    claim: Claim | None = None
    """The claim that `spec.storage` names."""
    clusters: tuple[Cluster, ...] = ()
    pods: tuple[Pod, ...] = ()
    fetch_job: FetchJob | None = None
    """The Job that fetches models and data. None: there is none, or nothing is to be fetched."""
    fetch_pods: tuple[FetchPod, ...] = ()
    workloads: tuple[Workload, ...] | None = ()
    """Of the RayClusters, where the job has a queue. None: the API server does not know Kueue's Workload."""
    config: Mapping[str, str] | None = None
    """Data of the job's ConfigMap."""
    ray: Ray | None = None
    """None: not asked, because there is no head that could answer."""
    log_tail: str | None = None
    """Last lines of the driver's log. None: not asked for."""
    reported_at: datetime | None = None
    """When the report in the status was seen to change last, by the clock of the looks. None: there is none."""
    last_error: str = ""
    """What went wrong in the last reconcile of this job; empty: nothing."""
    dry_run: str | None = None
    """Why the API server refuses the RayCluster of the new layout; empty: it accepts it. None: not asked."""


@dataclass(frozen=True)
class Submission:
    """A job for Ray."""

    submission_id: str
    entrypoint: str
    environment: Mapping[str, str]
    metadata: Mapping[str, str]
    cluster: str
    """RayCluster that it is for."""


@dataclass(frozen=True)
class EventRecord:
    """An Event about the job."""

    reason: str
    """One of `constants.Reason`."""
    message: str
    is_warning: bool
    action: str
    """What the operator was about: the type of the condition that changed."""


@dataclass(frozen=True)
class Plan:
    """What is to be done, in this order: apply, stop, submit, write the status, delete, emit."""

    apply: tuple[Manifest, ...] = ()
    stop_submissions: tuple[str, ...] = ()
    """Submissions of earlier attempts that Ray still runs."""
    submission: Submission | None = None
    status: Mapping[str, Any] | None = None
    """The operator's own part of the status, whole. None: it stays as it is."""
    delete_clusters: tuple[str, ...] = ()
    """RayClusters to release."""
    delete_fetch_job: bool = False
    """The Job that fetches models and data must not run any longer."""
    delete_job: bool = False
    """The PPOJob itself has outlived its time."""
    events: tuple[EventRecord, ...] = ()
    dry_run: Manifest | None = None
    """RayCluster that the API server is asked about before anything else is done. None: none."""
    wanted_log: str = ""
    """Submission whose log is needed to decide; nothing else is done before. Empty: none."""
    look_again_after: float | None = None
    """Seconds until the next look, if no watch asks for it earlier. None: no need."""
