"""The parts of `status` that trainer and fetch report: progress, metrics, checkpoint, model, sources, advice.

`progress.py` has the reports. Field manager `ppojob-progress` writes these parts.
"""

from typing import Annotated, Any

from pydantic import Field
from pydantic.config import JsonDict

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.constants import MAX_REQUEST_LENGTH

Message = Annotated[str, Field(max_length=4096)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Name = Annotated[str, Field(max_length=253)]
Number = Annotated[str, Field(max_length=64)]
_COUNT = Field(ge=0, le=2**31 - 1)


def map_by(key: str, limit: int) -> Any:
    """Return the field of a list whose entries server-side apply merges by a key."""
    extra: JsonDict = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return Field(default_factory=list, max_length=limit, json_schema_extra=extra)


class Progress(ApiModel):
    """Progress of the run."""

    step: int = 0
    """Steps done."""
    total_steps: int = 0
    """Steps of the run. 0: with totalEpochs, the trainer has not counted the prompts yet."""
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
    """Number of phases that the attempt has finished, including loading and saving."""
    activity: Name | None = None
    """Current activity of the trainer: Loading, Validating, Training, Saving, Exporting."""
    first_step_time: Time | None = None
    """When the first step was done."""
    last_update_time: Time | None = None
    """When the trainer reported last."""
    last_change_time: Time | None = None
    """When a report last differed from the previous one in attempt, step, phases, activity, checkpoint or model."""
    attempt: int | None = None
    """Attempt of the last report."""
    report: int | None = None
    """Number of the last report within the attempt; older reports are ignored."""
    trainer_version: Name | None = None
    """Version of the trainer that reported."""


class Metric(ApiModel):
    """One metric of the last step; a string, as in Kubernetes' own APIs."""

    name: Name
    """Name of the metric; verl's, if verl has it."""
    value: Number
    """Value."""


class StepChecks(ApiModel):
    """How old and how exact the weights were that generated the last step's responses, and how long all GPUs waited."""

    step: Annotated[int, _COUNT]
    """The step."""
    oldest_weights_step: Annotated[int, _COUNT]
    """Step after which the policy had the oldest weights that generated responses of this step. 0: initial weights."""
    max_staleness: Annotated[int, _COUNT]
    """Steps between those weights and the weights that this step trained. 0: on-policy."""
    compared_weights_step: Annotated[int, _COUNT] | None = None
    """Step after which the policy had the weights that were last read back from all engines and were equal to the
    actor's. 0: initial weights. If they differ, the attempt ends. Absent: the weights of all engines were not read
    back, which needs CUDA; otherwise the loaded numbers are counted. The checksums of each transfer are compared in any
    case."""
    rollout_probs_diff_mean: Number | None = None
    """Mean difference of the probabilities that trainer and engine give to the sampled tokens."""
    idle_fraction: Number
    """Share of the step in which no pool computed."""


class CheckpointStatus(ApiModel):
    """The newest checkpoint."""

    step: Annotated[int, _COUNT]
    """Step after which it was saved."""
    path: Message
    """Folder, as the container sees it, or address in a bucket."""
    time: Time
    """When it was completely saved."""
    request: Annotated[str, Field(max_length=MAX_REQUEST_LENGTH)] | None = None
    """Last value of the annotation ppojob.dev/checkpoint-request that a checkpoint has answered."""


class UploadFailure(ApiModel):
    """Why an export is not where `checkpoint.exportTo` says."""

    reason: Name
    """One word for programs."""
    message: Message
    """A sentence with what is wrong and what to do."""


class ModelStatus(ApiModel):
    """The exported policy."""

    path: Message
    """HuggingFace folder of the newest export, as the container sees it."""
    address: Message | None = None
    """Where the newest complete upload is (`checkpoint.exportTo`), with `/step-N` or `@step-N` for export Each."""
    upload_failure: UploadFailure | None = None
    """Why the last upload failed. Absent: it did not."""


class SourceStatus(ApiModel):
    """A model or data that was fetched into the storage."""

    address: Message
    """Address in the spec."""
    path: Message
    """Folder or file that the trainer reads."""
    revision: Name | None = None
    """Commit of the repository on the hub. Absent: it comes from a bucket."""
    bytes: int = Field(ge=0)
    """Size of its files."""


class FetchStatus(ApiModel):
    """The fetch of models and data, as its pod reported last."""

    address: Message | None = None
    """Address that is being fetched. Absent: none."""
    bytes: int = Field(default=0, ge=0)
    """Bytes that are in the storage, of all addresses."""
    total_bytes: int | None = Field(default=None, ge=0)
    """Bytes of all addresses. Absent: not all sizes are known yet."""
    message: Message | None = None
    """What it waits for, or why it failed."""
    pod: Name
    """Pod that reported."""
    report: int = Field(default=0, ge=0)
    """Number of the report; older reports of the pod are ignored."""
    last_update_time: Time
    """When it reported."""


class PoolSize(ApiModel):
    """Another size of a pool."""

    name: Name
    """Name of the pool."""
    nodes: int = Field(ge=1, le=4096)
    """Ray worker pods, as in spec.pools."""
    gpus_per_node: int = Field(ge=1, le=64)
    """GPUs of each pod, as in spec.pools."""


class LayoutAdvice(ApiModel):
    """Other sizes of the pools, and what they would do to the step."""

    pools: Annotated[list[PoolSize], map_by("name", 7)]
    """All pools of the job, including those that keep their size."""
    gpus: int = Field(ge=1, le=7 * 4096 * 64)
    """GPUs of all pools."""
    step_time_percent: int = Field(ge=-100, le=2**31 - 1)
    """Predicted change of the step time: 3 is 3 % longer, -12 is 12 % shorter."""
