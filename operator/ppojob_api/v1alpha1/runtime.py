"""`spec.device`, `spec.env`, `spec.storage`, `spec.runPolicy`: the job's life on the cluster."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.quantities import ObjectName, RawObject
from ppojob_api.v1alpha1.spelling import spelled


class Device(StrEnum):
    """What the roles compute on."""

    CUDA = "CUDA"
    CPU = "CPU"


class EnvVar(ApiModel):
    """core/v1 EnvVar."""

    name: Annotated[
        str,
        spelled(
            r"^[-._a-zA-Z][-._a-zA-Z0-9]*$",
            "must have letters, digits, '_', '-' and '.' only, and not begin with a digit",
            max_length=253,
        ),
    ]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=32_768)] | None = None
    """Value of the variable."""
    value_from: RawObject | None = None
    """Source of the value (core/v1 EnvVarSource), such as a key of a Secret."""


EnvVars = Annotated[
    list[EnvVar],
    Field(
        max_length=128,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
]


class Storage(ApiModel):
    """Where models are read, and logs, metrics, checkpoints and the exported model are written."""

    claim_name: ObjectName
    """Claim in the job's namespace; ReadWriteMany if the pods run on several hosts."""
    mount_path: Annotated[str, spelled(r"^/.+", "must be an absolute path below /, such as /data", max_length=253)] = (
        "/data"
    )
    """Mount path in the pods."""


class AutoBalance(ApiModel):
    """Moving GPUs to the pools that want them, as the trainer recommends."""

    enabled: bool = False
    """Apply `status.layoutAdvice` within minNodes and maxNodes of the pools, with a graceful stop. The spec is never
    changed; `status.effectivePools` has the new sizes. false returns to the spec."""
    interval_minutes: int = Field(default=60, ge=1, le=525_600)
    """Shortest time that an attempt runs before its pools are changed, in minutes."""


QueueName = Annotated[
    str,
    spelled(
        r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        "must be a label's value: letters, digits, '-', '_' and '.', with a letter or digit at both ends",
        min_length=1,
        max_length=63,
    ),
]
"""A name that goes into a label."""


class GangScheduler(StrEnum):
    """Who binds all pods of a job at once, or none."""

    NONE = "None"
    VOLCANO = "Volcano"
    YUNIKORN = "YuniKorn"
    KAI = "KAI"


class FailureAction(StrEnum):
    """What follows a failed attempt."""

    RETRY = "Retry"
    IGNORE = "Ignore"
    FAIL = "Fail"


class FailureReason(StrEnum):
    """Reasons of a failed attempt, as in `status.lastFailure.reason`."""

    ALGORITHM_FUNCTION_FAILED = Reason.ALGORITHM_FUNCTION_FAILED
    BATCH_NOT_FILLED = Reason.BATCH_NOT_FILLED
    BUCKET_REFUSED = Reason.BUCKET_REFUSED
    BUCKET_UNREACHABLE = Reason.BUCKET_UNREACHABLE
    CHECKPOINT_UNREADABLE = Reason.CHECKPOINT_UNREADABLE
    CHECKPOINT_UNWRITABLE = Reason.CHECKPOINT_UNWRITABLE
    CLUSTER_DELETED = Reason.CLUSTER_DELETED
    COMMUNICATION_FAILED = Reason.COMMUNICATION_FAILED
    DATA_UNREADABLE = Reason.DATA_UNREADABLE
    FENCED_OUT = Reason.FENCED_OUT
    GPU_FAULT = Reason.GPU_FAULT
    HEAD_LOST = Reason.HEAD_LOST
    HOOK_FAILED = Reason.HOOK_FAILED
    INTERRUPTED = Reason.INTERRUPTED
    INVALID_SPEC = Reason.INVALID_SPEC
    JOB_FILE_MISSING = Reason.JOB_FILE_MISSING
    MODEL_MISMATCH = Reason.MODEL_MISMATCH
    MODEL_NOT_FOUND = Reason.MODEL_NOT_FOUND
    NO_PROGRESS = Reason.NO_PROGRESS
    NODE_LOST = Reason.NODE_LOST
    NON_FINITE = Reason.NON_FINITE
    OUT_OF_MEMORY = Reason.OUT_OF_MEMORY
    PHASE_TIMEOUT = Reason.PHASE_TIMEOUT
    POD_LOST = Reason.POD_LOST
    POOL_NOT_PLACED = Reason.POOL_NOT_PLACED
    PREEMPTED = Reason.PREEMPTED
    REWARD_FAILED = Reason.REWARD_FAILED
    REWARD_IMPORT_FAILED = Reason.REWARD_IMPORT_FAILED
    TRAINER_FAILED = Reason.TRAINER_FAILED
    TRAINER_TOO_OLD = Reason.TRAINER_TOO_OLD
    UPLOAD_REFUSED = Reason.UPLOAD_REFUSED
    WORKER_IMPORT_FAILED = Reason.WORKER_IMPORT_FAILED
    WORKER_LOST = Reason.WORKER_LOST


class FailedRole(StrEnum):
    """Whose process has failed, as rules name it."""

    ACTOR = "actor"
    ROLLOUT = "rollout"
    REF = "ref"
    CRITIC = "critic"
    REWARD = "reward"
    DATA = "data"
    WORKERS = "workers"


class FailureRule(ApiModel):
    """What follows certain failures. It matches an attempt if all of its criteria match."""

    action: FailureAction
    """Retry: retry, and count the failure against backoffLimit. Ignore: retry without counting it. Fail: fail the
    job."""
    reasons: Annotated[list[FailureReason], Field(min_length=1, max_length=32)] | None = None
    """The attempt's `status.lastFailure.reason` is one of these. Absent: any reason matches."""
    exit_codes: Annotated[list[Annotated[int, Field(ge=1, le=255)]], Field(min_length=1, max_length=32)] | None = None
    """The attempt's `status.lastFailure.exitCode` is one of these. Absent: any exit code matches, also an unknown
    one."""
    roles: Annotated[list[FailedRole], Field(min_length=1, max_length=8)] | None = None
    """The attempt's `status.lastFailure.role` is one of these; workers: it is the name of one of `spec.workers`.
    Absent: any role matches, also an unknown one."""


class FailurePolicy(ApiModel):
    """What follows a failed attempt."""

    rules: Annotated[list[FailureRule], Field(max_length=20)] = Field(default_factory=list)
    """The first rule that matches decides. If none matches: disruptions (Preempted, NodeLost, ClusterDeleted) are
    ignored, permanent failures fail the job, and the others are retried."""


class RunPolicy(ApiModel):
    """Queue, suspension, failures and deadlines."""

    queue_name: QueueName | None = None
    """Kueue's LocalQueue in the job's namespace. The job has pods only while it is admitted. If the queue pre-empts it,
    the job saves a checkpoint and resumes when it is admitted again. Absent: the value of the job's label
    kueue.x-k8s.io/queue-name, else Kueue's default queue in the namespace, else no queue."""
    queue_priority_class: QueueName | None = None
    """Kueue's WorkloadPriorityClass, which decides admission and pre-emption. Absent: the queue's default."""
    gang_scheduler: GangScheduler = GangScheduler.NONE
    """Gang scheduler with which KubeRay was started (`--batch-scheduler`). It binds all pods of the job at once, so
    that two jobs never wait for each other's GPUs. None: the scheduler of Kubernetes, pod by pod."""
    gang_scheduler_queue: QueueName | None = None
    """Queue of the gang scheduler; required for KAI. Absent: its default."""
    suspend: bool = False
    """true: save a checkpoint, stop, and release all pods and the quota of a queue. false: resume from the checkpoint.
    A job that is created suspended gets no pods. Neither counts as a retry."""
    stop_grace_period_seconds: int = Field(default=600, ge=1, le=86_400)
    """Longest time for a graceful stop, in seconds: to finish the step, save a checkpoint and exit. It applies to
    suspend, another layout, pre-emption, and deleted pods. Then the pods are deleted, and the run resumes from the last
    checkpoint."""
    backoff_limit: int = Field(default=6, ge=0, le=10_000)
    """Number of counted failures since the last progress that are retried; the next one fails the job. A newer
    checkpoint counts as progress and resets the count. `status.retries.counted` has the number so far."""
    failure_policy: FailurePolicy = FailurePolicy()
    """Which failures are counted, ignored, or fail the job at once."""
    startup_deadline_seconds: int = Field(default=1800, ge=1, le=31_536_000)
    """Longest time from admission (also by the queue) until all pools are ready, and from then until the trainer
    starts, in seconds each. Then a job that has never run fails; a job that has run keeps waiting."""
    partial_pods_timeout_seconds: int = Field(default=3600, ge=1, le=31_536_000)
    """Longest time in which a job that has run keeps GPUs while not all of its pods start, in seconds. Then all pods
    are released, and created again after a pause of at most this time, which differs between jobs. So two jobs do not
    wait for each other's GPUs for ever. In a queue, it has no effect, because the queue admits all pods or none."""
    active_deadline_seconds: int | None = Field(default=None, ge=1, le=315_360_000)
    """Longest active time over all attempts, in seconds, without the time suspended or queued. Then the job fails.
    Absent: none."""
    stall_timeout_seconds: int = Field(default=1800, ge=10, le=31_536_000)
    """Longest time in which reports show no change, not even a finished phase of a step, in seconds. Then the job is
    Stalled. It must exceed the longest phase of a step, loading, and checkpoint. Missing reports do not count."""
    restart_on_stall: bool = True
    """Stop a stalled attempt and count it as failed. false: only set the condition Stalled."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=315_360_000)
    """Time from the end of the job until its object is deleted, in seconds. The storage is kept. Absent: never."""
