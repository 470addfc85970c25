"""`spec.workers`: worker groups of the user's own, and where the controller calls them."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules
from ppojob_api.v1alpha1.quantities import DNSLabel, Path, RawObject, ShortText
from ppojob_api.v1alpha1.spelling import spelled

RESERVED_NAMES = ("actor", "rollout", "ref", "critic", "reward", "data")
"""Names of the built-in groups, which logs and timings use."""


class HookPoint(StrEnum):
    """Where a step calls a user's method."""

    GENERATE = "Generate"
    SCORE = "Score"
    STEP = "Step"


class Hook(ApiModel):
    """A call of a worker's method, in every step."""

    after: HookPoint
    """Generate: after the responses. Score: after the scores; returned columns, such as token_level_scores, replace
    those with the same name. Step: with all inputs of the updates; it returns metrics only."""
    method: Annotated[
        str,
        spelled(
            r"^[A-Za-z_][A-Za-z0-9_]*$", "must be the name of a Python method, without parentheses", max_length=253
        ),
    ]
    """Name of a method of the class with `@register`; its dispatch mode decides which process gets which rows."""


class WorkerSpec(ApiModel):
    """A worker group of the user's own: processes in a pool, each with an object of the class."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                rule="has(self.module) != has(self.path)",
                message="set exactly one of module and path",
            ),
            Rule(
                rule=f"!(self.name in {list(RESERVED_NAMES)!r})",
                message="this is the name of a built-in worker group: choose another",
                field_path=".name",
            ),
            Rule(
                rule="self.numWorkers % (self.tensorParallelSize * self.pipelineParallelSize) == 0",
                message="tensorParallelSize * pipelineParallelSize must divide numWorkers",
                field_path=".numWorkers",
            ),
        )
    )

    name: DNSLabel
    """Name of the group, in logs, timings and errors."""
    module: ShortText | None = None
    """Dotted name of an installed module."""
    path: Path | None = None
    """Path of a Python file, as the containers of the head and the pool see it."""
    class_name: ShortText
    """Name of the class in it. It is created with a `WorkerContext` (rank, group size, node) and the kwargs."""
    kwargs: RawObject = Field(default_factory=dict)
    """Keyword arguments of the class."""
    pool: DNSLabel
    """Pool whose pods run the processes."""
    num_workers: int = Field(default=1, ge=1, le=256)
    """Number of processes."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Processes that compute a layer together. With MESH_COMPUTE_PROTO and DP_COMPUTE_METRIC, they and those of the
    other stages get the same rows, and the first of them answers."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    """Stages of a pipeline. Each is a consecutive part of the processes."""
    uses_gpu: bool = False
    """Each process sees one GPU of the pool, and shares it with the pool's roles."""
    hooks: Annotated[list[Hook], Field(min_length=1, max_length=8)]
    """Methods that the controller calls in each step, in this order."""


Workers = Annotated[
    list[WorkerSpec],
    Field(
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
]
