"""`status`: what the operator and the trainer's reports say of a PPOJob.

Two field managers write it by server-side apply: `ppojob-operator` what the operator decides, `ppojob-progress`
what the trainer reports. The comments name the owner; no field has two.
"""

from typing import Annotated, Any

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.constants import MAX_AVOIDED_NODES, MAX_REQUEST_LENGTH, MAX_SOURCES
from ppojob_api.v1alpha1.layout import Layout
from ppojob_api.v1alpha1.notification import NotificationsStatus
from ppojob_api.v1alpha1.reported import (
    CheckpointStatus,
    FetchStatus,
    LayoutAdvice,
    Message,
    Metric,
    ModelStatus,
    Name,
    Number,
    Progress,
    SourceStatus,
    StepChecks,
    Time,
    map_by,
)
from ppojob_api.v1alpha1.template_reference import PinnedTemplate

LongText = Annotated[str, Field(max_length=32_768)]


def _replaced_whole(limit: int) -> Any:
    # With a key the API server would note for each entry who wrote it, with every report: a fifth of a write's cost.
    return Field(default_factory=list, max_length=limit, json_schema_extra={"x-kubernetes-list-type": "atomic"})


class OperatorStatus(ApiModel):
    """The operator that runs the job: every other one leaves it alone."""

    namespace: Name
    """Namespace of its release."""
    lease: Name
    """Lease of its replicas. Namespace and Lease identify the operator across restarts and upgrades."""
    version: Name
    """Its version."""


class ConditionStatus(ApiModel):
    """metav1.Condition."""

    type: Name
    """TemplateResolved, Accepted, SourcesFetched, Admitted, PoolsReady, Submitted, Progressing, Stalled, LayoutApplied,
    ModelUploaded, Suspended, Complete or Failed."""
    status: Annotated[str, Field(pattern="^(True|False|Unknown)$")]
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """One word for programs."""
    message: LongText
    """A sentence for people."""
    last_transition_time: Time
    """When status changed last."""
    observed_generation: int = Field(ge=0)
    """Generation of the spec to which the condition applies."""


class Retries(ApiModel):
    """Retries: totals of the job, and the failures since the last progress."""

    user: int = 0
    """Retries after counted failures of the user's program, in total."""
    infrastructure: int = 0
    """Retries after counted failures of the cluster, in total."""
    ignored: int = 0
    """Retries after failures that are not counted, such as disruptions, in total."""
    total: int = 0
    """All retries."""
    counted: int = 0
    """Counted failures since the last progress; `runPolicy.backoffLimit` limits them."""
    since_progress: int = 0
    """All failures since the last progress. The pause before a retry grows with them."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint at the first of these failures; 0: there was none. A checkpoint of a later step is
    progress. Absent: no failure since the last progress."""


class PoolStatus(ApiModel):
    """One pool: desired, ready and message from the operator; busyFraction and engines from the trainer."""

    name: Name
    """Name of the pool."""
    desired_nodes: int | None = None
    """Pods that the spec requests."""
    ready_nodes: int | None = None
    """Pods that are ready."""
    gpus: int | None = None
    """GPUs of the whole pool."""
    busy_fraction: Number | None = None
    """Share of the last step in which a role of the pool computed."""
    engines: int | None = Field(default=None, ge=0)
    """Engines of an elastic pool that generated after the last push of the weights. Absent: the pool is not elastic."""
    message: Message | None = None
    """Why pods are not ready, as reported by the scheduler or the kubelet."""


class RayClusterStatus(ApiModel):
    """The RayCluster of the job."""

    name: Name
    """Name of the RayCluster."""
    uid: Name | None = None
    """UID of the RayCluster. Absent: it is being created."""
    dashboard_url: Message | None = Field(default=None, alias="dashboardURL")
    """Address of Ray's dashboard inside the cluster."""
    unreachable_since: Time | None = None
    """Since when the dashboard does not answer while the trainer runs. Absent: it answers, or no trainer runs."""
    avoided_nodes: Annotated[list[Name], Field(max_length=MAX_AVOIDED_NODES)] | None = None
    """Names of the nodes in `status.avoidedNodes` when it was created. Absent: none."""


class AvoidedNode(ApiModel):
    """A node on which the scheduler should place no pods of the job if it has a choice."""

    name: Name
    """Name of the node."""
    reason: Name
    """NodeLost: the node failed or did not respond. GPUFault: a GPU of the node failed."""
    attempt: int = Field(ge=0)
    """Attempt whose pod was on the node."""
    time: Time
    """When the operator saw the problem. The node is removed from the list six hours later, or after progress on other
    nodes."""


class LastFailure(ApiModel):
    """Why the last attempt failed."""

    attempt: int
    """Number of the attempt."""
    reason: Name
    """One word for programs."""
    message: Message
    """A sentence for people."""
    exit_code: int | None = None
    """Exit code of the trainer, or of the pod's container. Absent: unknown."""
    role: Name | None = None
    """Role of the process that failed, or name of a worker in `spec.workers`. Absent: unknown, or no process did."""
    log_tail: LongText | None = None
    """The last lines of the trainer's log."""
    layout_digest: Name | None = None
    """Short hash of the layout in force. If two attempts in a row run out of memory with the same hash, the job
    fails."""
    time: Time
    """When it failed."""


class StopStatus(ApiModel):
    """The last graceful stop that the operator requested. Replies to reports of its attempt have the command."""

    attempt: int
    """Number of the attempt that stops or has stopped."""
    reason: Name
    """Suspending, Reallocating, Preempted, StartupDelayed (autoBalance found no room for larger pools), or
    PodsReleased (not all pods could start)."""
    time: Time
    """When it was requested."""
    completion_time: Time | None = None
    """When it was complete. Absent: the trainer has not stopped yet."""


class GPUUsage(ApiModel):
    """GPU time of the job, over all attempts. Pods that are bound to a node hold their GPUs; a GPU is idle while no
    role of its pool computes."""

    gpu_hours: Number
    """GPU-hours of the job so far."""
    idle_gpu_hours: Number
    """Idle GPU-hours, part of gpuHours: until the end of the first step, loading, saving, between attempts, and in a
    step the share in which the pool waits, as in pools[].busyFraction."""
    gpus: int = Field(ge=0)
    """GPUs that the job had at `time`. gpuHours does not include the time since then yet."""
    busy_fraction: Number
    """Share of these GPUs that computed at `time`, as in the last step; 0 outside the steps."""
    time: Time
    """End of the counted time. Time is counted at each change of the status, and every ten minutes."""


class RetryStatus(ApiModel):
    """The last request to run a job again that has ended (`kubectl ppo retry`)."""

    request: Annotated[str, Field(max_length=MAX_REQUEST_LENGTH)]
    """Last value of the annotation ppojob.dev/retry-request that the operator has answered."""
    refusal: Message | None = None
    """Why the job does not run again. Absent: it does."""
    time: Time
    """When the request was answered."""


class EffectivePool(ApiModel):
    """A pool that autoBalance has moved."""

    name: Name
    """Name of the pool."""
    nodes: int = Field(ge=1)
    """Number of pods of the pool."""
    spec_nodes: int = Field(ge=1)
    """Number of pods in the spec when autoBalance changed it; an edit of the spec takes precedence."""


class PPOJobStatus(ApiModel):
    """What is known of the job."""

    operator: OperatorStatus | None = None
    """The operator that runs the job. The annotation ppojob.dev/operator assigns another one."""
    observed_generation: int | None = None
    """Generation of the spec that the operator saw last."""
    phase: Name | None = None
    """One word for the table of kubectl; derived from the conditions."""
    conditions: Annotated[list[ConditionStatus], map_by("type", 16)]
    """The state of the job, as metav1.Conditions."""
    attempt: int | None = None
    """Number of the current attempt, from 0."""
    submission_id: Name | None = None
    """Ray's submission of the current attempt."""
    start_time: Time | None = None
    """When the job was last admitted (also by its queue) or resumed."""
    active_seconds: int | None = Field(default=None, ge=0)
    """Active time before startTime, in seconds."""
    completion_time: Time | None = None
    """When the job ended."""
    retries: Retries | None = None
    """Retries by cause."""
    ready: Name | None = None
    """Ready GPUs / requested GPUs."""
    pools: Annotated[list[PoolStatus], map_by("name", 7)]
    """State of each pool."""
    fetch: FetchStatus | None = None
    """The fetch of models and data. Absent: nothing is fetched, or the trainer has reported since."""
    sources: Annotated[list[SourceStatus], _replaced_whole(MAX_SOURCES)]
    """The fetched models and data; at most the first 32."""
    progress: Progress | None = None
    """Progress of the run."""
    metrics: Annotated[list[Metric], _replaced_whole(64)]
    """Metrics of the last step."""
    checks: StepChecks | None = None
    """Results of the checks of the last step. Absent: no step is done yet."""
    checkpoint: CheckpointStatus | None = None
    """The newest checkpoint."""
    model: ModelStatus | None = None
    """The exported policy."""
    ray_cluster: RayClusterStatus | None = None
    """The RayCluster of the job."""
    avoided_nodes: Annotated[list[AvoidedNode], map_by("name", MAX_AVOIDED_NODES)]
    """Nodes on which an attempt has lost a pod or a GPU. The next RayCluster prefers other nodes."""
    last_failure: LastFailure | None = None
    """Why the last attempt failed. Absent: none has failed since the job began, or since it was run again."""
    retry: RetryStatus | None = None
    """The last answer to `kubectl ppo retry`."""
    stop: StopStatus | None = None
    """The last graceful stop that the operator requested."""
    gpu_usage: GPUUsage | None = None
    """GPU time of the job. Absent: it has had no GPUs yet."""
    notifications: NotificationsStatus | None = None
    """Notifications to the administrator's receiver. Absent: none was due."""
    queue_name: Name | None = None
    """Kueue's LocalQueue of the job, from spec.runPolicy.queueName or the label kueue.x-k8s.io/queue-name of the job,
    or else of its RayCluster, where Kueue writes its default queue. Afterwards, it does not change. Absent: no
    queue."""
    template: PinnedTemplate | None = None
    """The template that completes the spec, as it was when the job was accepted. Absent: the spec names none."""
    effective_layout: Layout | None = None
    """The layout in force. A new layout in the spec replaces it after a graceful stop."""
    effective_pools: Annotated[list[EffectivePool], map_by("name", 7)]
    """Pools whose size autoBalance has changed."""
    recommendation: Message | None = None
    """Advice on the layout, from measured phases. Absent: no better layout is known."""
    layout_advice: Annotated[list[LayoutAdvice], Field(max_length=3)] = Field(default_factory=list)
    """Layouts of the recommendation: fewer GPUs, more GPUs, or the same GPUs in other pools."""
