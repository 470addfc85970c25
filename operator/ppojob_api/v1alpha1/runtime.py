"""`spec.device`, `spec.env`, `spec.storage`, `spec.runPolicy`: the job's life on the cluster."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.quantities import RawObject


class Device(StrEnum):
    """What the roles compute on."""

    CUDA = "cuda"
    CPU = "cpu"


class EnvVar(ApiModel):
    """core/v1 EnvVar."""

    name: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=253)]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=32_768)] | None = None
    """Its value."""
    value_from: RawObject | None = None
    """Its source (core/v1 EnvVarSource), such as a key of a Secret."""


EnvVars = Annotated[
    list[EnvVar],
    Field(
        max_length=128,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
]


class Storage(ApiModel):
    """Where models are read, and logs, metrics, checkpoints and the exported model are written."""

    persistent_volume_claim: Annotated[str, Field(min_length=1, max_length=253)]
    """Claim in the job's namespace; ReadWriteMany where the pods may be on several hosts."""
    mount_path: Annotated[str, Field(pattern=r"^/.+", max_length=253)] = "/data"
    """Where the pods see it."""


class AutoBalance(ApiModel):
    """Moving GPUs to the pools that want them, as the trainer recommends."""

    enabled: bool = False
    """Apply what `status.layoutAdvice` says within minNodes and maxNodes of the pools: another layout, by a stop in
    order. The spec is never written; `status.effectivePools` says what was moved. false goes back to the spec."""
    interval_minutes: int = Field(default=60, ge=1, le=525_600)
    """How long an attempt runs at the least before its pools are changed, in minutes."""


QueueName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", min_length=1, max_length=63)]
"""A name that goes into a label."""


class GangScheduler(StrEnum):
    """Who binds all pods of a job at once, or none."""

    NONE = "None"
    VOLCANO = "Volcano"
    YUNIKORN = "YuniKorn"
    KAI = "KAI"


class RunPolicy(ApiModel):
    """Queue, suspension, failures and deadlines."""

    queue_name: QueueName | None = None
    """Kueue's LocalQueue in the job's namespace. The job has pods only while the queue lets it in; where the queue
    takes its GPUs away, it puts a checkpoint down and goes on when it is let in again. Absent: no queue."""
    queue_priority_class: QueueName | None = None
    """Kueue's WorkloadPriorityClass: who is let in first, and who has to go for whom. Absent: the queue's default."""
    gang_scheduler: GangScheduler = GangScheduler.NONE
    """The scheduler with which KubeRay was started (`--batch-scheduler`): it binds all pods of the job at once, so that
    two jobs never wait for each other's GPUs. None: Kubernetes' own, pod by pod."""
    gang_scheduler_queue: QueueName | None = None
    """Queue of the gang scheduler. KAI needs one. Absent: its default."""
    suspend: bool = False
    """Put a checkpoint down, stop, and give all pods back; false goes on from there. A job that is created suspended
    gets no pods. Neither counts as a retry. A queue gets its quota back."""
    stop_grace_period_seconds: int = Field(default=600, ge=1, le=86_400)
    """Longest time for the trainer to finish its step, to put a checkpoint down and to end, in seconds, where it is to
    stop in order: for suspend, for another layout, for the queue, or because its pods are deleted, which wait for it.
    Then the pods go, and the last checkpoint counts."""
    backoff_limit: int = Field(default=3, ge=0, le=10_000)
    """Retries after failures of the user's program."""
    infrastructure_backoff_limit: int = Field(default=10, ge=0, le=10_000)
    """Retries after failures of the cluster, such as a lost node."""
    startup_deadline_seconds: int = Field(default=1800, ge=1, le=31_536_000)
    """Longest time from admission, by the queue too, to all pools being ready, in seconds, and from there to the
    trainer's start. Then a job that has never run fails; one that has run waits on."""
    active_deadline_seconds: int | None = Field(default=None, ge=1, le=315_360_000)
    """Longest active time over all attempts, in seconds; it stands still while the job is suspended or in its queue.
    Absent: none."""
    stall_timeout_seconds: int = Field(default=1800, ge=10, le=31_536_000)
    """Longest time for which the trainer may report nothing new, not even that a phase of a step is done, in seconds;
    then the job is Stalled. It must be more than the longest phase of a step, loading or checkpoint takes. Silence does
    not count."""
    restart_on_stall: bool = True
    """A stalled attempt is stopped and counts as failed. false only says so, in the condition Stalled."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=315_360_000)
    """Delete the object this long after its end, in seconds. Absent: never. The storage is not touched."""
