"""`spec.reward`: what a response is worth."""

from enum import StrEnum

from pydantic import ConfigDict, Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules
from ppojob_api.v1alpha1.quantities import Path, RawObject, ShortText


class RewardType(StrEnum):
    """Who scores a response."""

    FUNCTION = "Function"


class OnError(StrEnum):
    """What an exception in the reward function leads to."""

    FAIL = "Fail"
    SCORE = "Score"


class RewardFunction(ApiModel):
    """A Python function `compute_score(data_source, solution_str, ground_truth, extra_info)`, as verl calls it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                rule="has(self.module) != has(self.path)",
                message="give either module or path, not both and not neither",
            )
        )
    )

    module: ShortText | None = None
    """Dotted name of an installed module."""
    path: Path | None = None
    """A Python file, as the container sees it."""
    name: ShortText = "compute_score"
    """Name of the function."""
    extract: ShortText = ""
    """Which part of the response is scored, for functions that offer it: whole, last_number, last_line, boxed.
    Empty: the function's default."""
    kwargs: RawObject = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    on_error: OnError = OnError.FAIL
    """Fail: an exception fails the job with the prompt's index. Score: the response gets errorScore."""
    error_score: float = 0.0
    """Score of a response whose reward function raised, with onError Score."""
    num_workers: int = Field(default=1, ge=1, le=256)
    """CPU processes that score at the same time."""
    timeout_seconds: int = Field(default=60, ge=1, le=86_400)
    """Longest time for scoring one batch in one process, in seconds."""


class RewardSpec(ApiModel):
    """How a response is scored."""

    type: RewardType = RewardType.FUNCTION
    """Who scores: Function."""
    function: RewardFunction
    """The reward function."""
