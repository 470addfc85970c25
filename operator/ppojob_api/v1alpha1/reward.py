"""`spec.reward`: what a response is worth."""

from enum import StrEnum

from pydantic import ConfigDict, Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules
from ppojob_api.v1alpha1.quantities import Path, RawObject, ShortText


class RewardType(StrEnum):
    """Who scores a response."""

    FUNCTION = "Function"
    MODEL = "Model"
    BOTH = "Both"


class OnError(StrEnum):
    """What is done with a response that the reward function does not score."""

    FAIL = "Fail"
    SCORE = "Score"
    DROP = "Drop"


class RewardFunction(ApiModel):
    """A Python function `compute_score(data_source, solution_str, ground_truth, extra_info)`, plain or a coroutine
    function. The signature is verl's. See docs/rewards.md."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                rule="has(self.module) != has(self.path)",
                message="set exactly one of module and path",
            )
        )
    )

    module: ShortText | None = None
    """Dotted name of an installed module."""
    path: Path | None = None
    """Path of a Python file in the container."""
    name: ShortText = "compute_score"
    """Name of the function."""
    extract: ShortText = ""
    """Which part of the response is scored, for functions that offer it: whole, last_number, last_line, boxed.
    Empty: the function's default."""
    kwargs: RawObject = Field(default_factory=dict)
    """Further keyword arguments of the function."""
    on_error: OnError = OnError.FAIL
    """What happens to a response if the reward function raises an exception, returns no finite number, ends its process
    or exceeds timeoutSeconds. Fail: the job fails with the prompt's index and is not retried. Score: the response gets
    errorScore. Drop: the response is left out of advantages, losses and the mean scores."""
    error_score: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Score of a response that the function does not score, with onError Score."""
    num_workers: int = Field(default=1, ge=1, le=256)
    """Reward workers, each with an equal part of the responses."""
    concurrency: int | None = Field(default=None, ge=1, le=1024)
    """Responses that one reward worker scores at the same time. A plain function has a process for each of them; a
    coroutine function has one process, in which the calls share an event loop. Absent: 1, for a coroutine function
    64."""
    timeout_seconds: int = Field(default=60, ge=1, le=86_400)
    """Longest time for scoring one response, in seconds. onError decides what happens then."""


# `function` is a reserved word of CEL, where a field of this name is `__function__`.


class RewardWeights(ApiModel):
    """With type Both: score = function x the function's score + model x the model's score."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                rule="self.__function__ != 0.0 || self.model != 0.0",
                message="both weights are 0, so every score would be 0: set at least one to another value",
            )
        )
    )

    function: float = Field(default=1.0, ge=-1e9, le=1e9)
    """Weight of the function's score."""
    model: float = Field(default=1.0, ge=-1e9, le=1e9)
    """Weight of the model's score."""


class OverlongPenalty(ApiModel):
    """DAPO's soft punishment of overlong responses (Yu et al. 2025, equation 13), beside the score."""

    buffer: int = Field(ge=1, le=1_048_576)
    """Length of the interval before data.maxResponseLength in which the penalty grows from 0 to factor, in
    tokens."""
    factor: float = Field(default=1.0, gt=0, le=1_000_000)
    """Penalty of a response with data.maxResponseLength tokens."""


class RewardSpec(ApiModel):
    """How a response is scored."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                rule="self.type == 'Model' ? !has(self.__function__) : has(self.__function__)",
                message="types Function and Both need the block function; type Model must not have it",
                field_path=".function",
            ),
            Rule(
                rule="self.type == 'Both' || !has(self.weights)",
                message="only type Both uses weights: remove them, or set type: Both",
                field_path=".weights",
            ),
        )
    )

    type: RewardType = RewardType.FUNCTION
    """What scores the responses: Function, Model (model.reward), or Both (their weighted sum)."""
    function: RewardFunction | None = None
    """The reward function, with type Function or Both."""
    weights: RewardWeights | None = None
    """Weights of the sum, with type Both. Absent: 1 each."""
    overlong_penalty: OverlongPenalty | None = None
    """Subtract a penalty for overlong responses from the reward. Scores, validation and dynamicSampling do not include
    it. Absent: none."""

    @property
    def uses_function(self) -> bool:
        """Whether a function scores."""
        return self.type is not RewardType.MODEL

    @property
    def uses_model(self) -> bool:
        """Whether a model scores."""
        return self.type is not RewardType.FUNCTION
