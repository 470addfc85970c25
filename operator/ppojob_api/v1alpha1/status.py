"""`status`: what the operator and the trainer's reports say of a PPOJob.

Two field managers write it by server-side apply: `ppojob-operator` what the operator decides, `ppojob-progress`
what the trainer reports. The comments name the owner; no field has two.
"""

from typing import Annotated, Any

from pydantic import Field
from pydantic.config import JsonDict

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.constants import MAX_REQUEST_LENGTH
from ppojob_api.v1alpha1.layout import Layout

LongText = Annotated[str, Field(max_length=32_768)]
Message = Annotated[str, Field(max_length=4096)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Name = Annotated[str, Field(max_length=253)]
Number = Annotated[str, Field(max_length=64)]


def _map_by(key: str, limit: int) -> Any:
    extra: JsonDict = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return Field(default_factory=list, max_length=limit, json_schema_extra=extra)


def _replaced_whole(limit: int) -> Any:
    # With a key the API server would note for each entry who wrote it, with every report: a fifth of a write's cost.
    return Field(default_factory=list, max_length=limit, json_schema_extra={"x-kubernetes-list-type": "atomic"})


class OperatorStatus(ApiModel):
    """The operator that runs the job: every other one leaves it alone."""

    namespace: Name
    """Namespace of its release."""
    lease: Name
    """Lease of its replicas. With the namespace it says who the operator is, over restarts and upgrades."""
    version: Name
    """Its version."""


class ConditionStatus(ApiModel):
    """metav1.Condition."""

    type: Name
    """Accepted, Admitted, PoolsReady, Submitted, Progressing, Stalled, LayoutApplied, Suspended, Complete or Failed."""
    status: Annotated[str, Field(pattern="^(True|False|Unknown)$")]
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """One word for programs."""
    message: LongText
    """A sentence for people."""
    last_transition_time: Time
    """When status changed last."""
    observed_generation: int = Field(ge=0)
    """Generation of the spec that this is about."""


class Retries(ApiModel):
    """Attempts that failed and were retried."""

    user: int = 0
    """After failures of the user's program."""
    infrastructure: int = 0
    """After failures of the cluster."""
    deleted: int | None = None
    """After somebody deleted the RayCluster of a running attempt, against no limit. Absent: none."""
    total: int = 0
    """All of them."""


class PoolStatus(ApiModel):
    """One pool: desired, ready and message from the operator; busyFraction from the trainer."""

    name: Name
    """Name of the pool."""
    desired_nodes: int | None = None
    """Pods that the spec asks for."""
    ready_nodes: int | None = None
    """Pods that are ready."""
    gpus: int | None = None
    """GPUs of the whole pool."""
    busy_fraction: Number | None = None
    """Share of the last step in which some role of the pool computed."""
    message: Message | None = None
    """Why pods are not ready, in the scheduler's or the kubelet's words."""


class Progress(ApiModel):
    """How far the run is."""

    step: int = 0
    """Steps done."""
    total_steps: int = 0
    """Steps of the run."""
    percentage: int = Field(default=0, ge=0, le=100)
    """Share of the steps that are done."""
    eta_seconds: int | None = None
    """Estimated time to the end, in seconds."""
    reward: Number | None = None
    """Mean score of the last step's responses."""
    validation_reward: Number | None = None
    """Mean score of the last validation."""
    first_validation_reward: Number | None = None
    """Mean score of the first validation."""
    phases: int | None = None
    """Phases of steps, of loading and of saving that the attempt has done."""
    activity: Name | None = None
    """What the trainer does: Loading, Validating, Training, Saving, Exporting."""
    first_step_time: Time | None = None
    """When the first step was done."""
    last_update_time: Time | None = None
    """When the trainer reported last."""
    last_change_time: Time | None = None
    """When a report last said something else than the one before it: attempt, step, phases, activity,
    checkpoint or model."""
    attempt: int | None = None
    """Attempt that reported last."""
    report: int | None = None
    """Number of that report within the attempt; an older one never replaces it."""
    trainer_version: Name | None = None
    """Version of the trainer that reported."""


class Metric(ApiModel):
    """One metric of the last step; a string, as in Kubernetes' own APIs."""

    name: Name
    """Name, as verl has it."""
    value: Number
    """Value."""


class CheckpointStatus(ApiModel):
    """The newest checkpoint."""

    step: int
    """Step after which it was written."""
    path: Message
    """Its folder, as the container sees it, or its address in a bucket."""
    time: Time
    """When it was complete."""
    request: Annotated[str, Field(max_length=MAX_REQUEST_LENGTH)] | None = None
    """Value of the annotation ppojob.dev/checkpoint-request that this checkpoint, or an earlier one, has answered."""


class ModelStatus(ApiModel):
    """The exported policy."""

    path: Message
    """HuggingFace folder, as the container sees it."""


class RayClusterStatus(ApiModel):
    """The RayCluster of the job."""

    name: Name
    """Name of the RayCluster."""
    uid: Name | None = None
    """Its UID. Absent: it is being made."""
    dashboard_url: Message | None = Field(default=None, alias="dashboardURL")
    """Ray's dashboard, inside the cluster."""
    unreachable_since: Time | None = None
    """When the dashboard ceased to answer while the trainer ran. Absent: it answers, or there is no trainer."""


class LastFailure(ApiModel):
    """Why the last attempt failed."""

    attempt: int
    """Number of the attempt."""
    reason: Name
    """One word for programs."""
    message: Message
    """A sentence for people."""
    exit_code: int | None = None
    """Exit code of the trainer, or of the pod's container that has ended; absent where it is not known."""
    log_tail: LongText | None = None
    """The last lines of the trainer's log."""
    layout_digest: Name | None = None
    """Short hash of the layout in force: two attempts that ran out of memory with the same one are enough."""
    time: Time
    """When it failed."""


class StopStatus(ApiModel):
    """The last stop in order that the operator asked for; its attempt's reports are answered with the command."""

    attempt: int
    """Number of the attempt that is to stop, or has stopped."""
    reason: Name
    """Suspending, Reallocating, Preempted, or StartupDelayed: autoBalance found no room for what it wanted."""
    time: Time
    """When it was asked for."""
    completion_time: Time | None = None
    """When it was over. Absent: the trainer is waited for."""


class PoolSize(ApiModel):
    """Another size of a pool."""

    name: Name
    """Name of the pool."""
    nodes: int = Field(ge=1)
    """Ray worker pods, as in spec.pools."""
    gpus_per_node: int = Field(ge=1)
    """GPUs of each pod, as in spec.pools."""


class LayoutAdvice(ApiModel):
    """Other sizes of the pools, and what they would do to the step."""

    pools: Annotated[list[PoolSize], _map_by("name", 7)]
    """All pools of the job, also those that keep their size."""
    gpus: int = Field(ge=1)
    """GPUs of all of them."""
    step_time_percent: int
    """Predicted change of the step time: 3 is 3 % longer, -12 is 12 % shorter."""


class EffectivePool(ApiModel):
    """A pool that autoBalance has moved."""

    name: Name
    """Name of the pool."""
    nodes: int = Field(ge=1)
    """Pods that it is to have."""
    spec_nodes: int = Field(ge=1)
    """Pods that the spec gives it; where that is edited, the spec counts."""


class PPOJobStatus(ApiModel):
    """What is known of the job."""

    operator: OperatorStatus | None = None
    """The operator that runs the job; the annotation ppojob.dev/operator hands it to another one."""
    observed_generation: int | None = None
    """Generation of the spec that the operator saw last."""
    phase: Name | None = None
    """Derived from the conditions, for the column."""
    conditions: Annotated[list[ConditionStatus], _map_by("type", 16)]
    """The state of the job, as metav1.Conditions."""
    attempt: int | None = None
    """Number of the current attempt, from 0."""
    submission_id: Name | None = None
    """Ray's submission of the current attempt."""
    start_time: Time | None = None
    """When the job was admitted, by its queue too, or went on after a suspension."""
    active_seconds: int | None = Field(default=None, ge=0)
    """For how long the job was active before it was suspended, or in its queue, last; since then startTime counts."""
    completion_time: Time | None = None
    """When the job ended."""
    retries: Retries | None = None
    """Attempts that failed and were tried again."""
    ready: Name | None = None
    """GPUs ready / wanted."""
    pools: Annotated[list[PoolStatus], _map_by("name", 7)]
    """The pools, each with its readiness."""
    progress: Progress | None = None
    """How far the run is."""
    metrics: Annotated[list[Metric], _replaced_whole(64)]
    """Metrics of the last step."""
    checkpoint: CheckpointStatus | None = None
    """The newest checkpoint."""
    model: ModelStatus | None = None
    """The exported policy."""
    ray_cluster: RayClusterStatus | None = None
    """The RayCluster of the job."""
    last_failure: LastFailure | None = None
    """Why the last attempt failed."""
    stop: StopStatus | None = None
    """The last stop in order that the operator asked for."""
    effective_layout: Layout | None = None
    """The layout in force; that of the spec follows when the trainer has stopped in order."""
    effective_pools: Annotated[list[EffectivePool], _map_by("name", 7)]
    """The pools that autoBalance has moved."""
    recommendation: Message | None = None
    """What the measured phases say about the layout; absent where it is as good as any other."""
    layout_advice: Annotated[list[LayoutAdvice], Field(max_length=3)] = Field(default_factory=list)
    """The layouts of which the recommendation speaks: fewer GPUs, more GPUs, the same GPUs in other pools."""
