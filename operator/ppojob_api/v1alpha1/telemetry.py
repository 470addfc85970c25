"""`spec.telemetry`: what a run reports besides its own files (metrics.jsonl, TensorBoard, plot, trace, logs)."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.quantities import ShortText


class Tracker(StrEnum):
    """Services that collect the metrics of many runs; the image needs their package."""

    WANDB = "WandB"
    MLFLOW = "MLflow"


class ProfiledRole(StrEnum):
    """Roles whose processes torch's profiler can profile; vLLM computes in separate processes."""

    ACTOR = "actor"
    CRITIC = "critic"
    REF = "ref"


class ProfileSpec(ApiModel):
    """Profiles of some steps, in `profile/` of the job's folder; the other steps run as if there were none."""

    steps: Annotated[list[Annotated[int, Field(ge=1, le=2**31 - 1)]], Field(min_length=1, max_length=16)]
    """Steps to profile. The first one is slow, because it compiles and allocates."""
    roles: Annotated[list[ProfiledRole], Field(min_length=1, max_length=3)] = Field(
        default_factory=lambda: [ProfiledRole.ACTOR, ProfiledRole.CRITIC]
    )
    """Roles to profile, with all ranks. Each method that the step calls writes one file per rank."""
    memory: bool = False
    """Also save a snapshot of the CUDA allocator's history; none with device CPU."""


class TelemetrySpec(ApiModel):
    """What a run reports besides its own files."""

    trackers: Annotated[list[Tracker], Field(max_length=2)] = Field(default_factory=list)
    """Services that also get the metrics. Their addresses and keys are environment variables, such as WANDB_API_KEY or
    MLFLOW_TRACKING_URI, for example by envFrom from a Secret."""
    tracker_project: Annotated[ShortText, Field(min_length=1)] = "ppojob"
    """Project of W&B, experiment of MLflow."""
    prometheus_port: int = Field(default=9464, ge=0, le=65_535)
    """Port of the head pod that serves the metrics of the last step at `/metrics`; 0: none."""
    samples_per_step: int = Field(default=4, ge=0, le=64)
    """Number of responses, with prompt and score, to keep of each step and validation, in samples.jsonl and in the log
    of data-0."""
    profile: ProfileSpec | None = None
    """Steps to profile with torch's profiler. Absent: none."""
