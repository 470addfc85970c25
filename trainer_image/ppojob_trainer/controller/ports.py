"""The interfaces that the controller calls, as Protocols. The worker groups implement them and the tests fake them.

`main` plugs the implementations in. A batch is opaque here: its rows stay in the workers, and the controller only joins
columns and passes the batch on. The controller sees ids, lengths, scalars and metrics.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.weights_port import WeightsPort

Metrics = Mapping[str, float]


class Batch(Protocol):
    """Rows (sequences) with columns. Its data may not be computed yet."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def union(self, *others: Self) -> Self:
        """Return one batch with the columns of all batches."""
        ...

    def replaced_by(self, other: Self) -> Self:
        """Return the columns of both batches; `other` wins where both have a column."""
        ...

    def take(self, rows: Sequence[int]) -> Self:
        """Return these rows, in this order."""
        ...

    def join_rows(self, others: Sequence[Self], numbers: Sequence[int]) -> Self:
        """Return the rows of this batch and of the others as one batch.

        Args:
            numbers: row numbers in the result, for the rows of this batch and then of `others` in order.
        """
        ...


B = TypeVar("B", bound=Batch)
B_co = TypeVar("B_co", bound=Batch, covariant=True)


class Sample(Protocol):
    """One row of prompts."""

    @property
    def prompt(self) -> Hashable:
        """What identifies the prompt in the data, the same in all epochs."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        ...


class Prompts(Protocol[B_co]):
    """The prompts of one step or of a validation, each repeated for its samples."""

    @property
    def batch(self) -> B_co:
        """prompt_ids, uid, sample_index, and the columns that the reward receives."""
        ...

    @property
    def samples(self) -> Sequence[Sample]:
        """What each row is; those of a prompt are consecutive."""
        ...

    @property
    def epoch(self) -> int:
        """The pass over the data that the prompts belong to, from 0; 0 for a validation."""
        ...


class Rollout(Protocol[B_co]):
    """Responses to prompts, row by row."""

    @property
    def batch(self) -> B_co:
        """The tokens of prompts and responses, the response mask, and the rollout's log-probs."""
        ...

    @property
    def prompt_lengths(self) -> Sequence[int]:
        """Tokens of each prompt."""
        ...

    @property
    def response_lengths(self) -> Sequence[int]:
        """Tokens of each response."""
        ...

    @property
    def oldest_versions(self) -> Sequence[int]:
        """Version of the weights that sampled each response's first token; empty unless weights change in flight."""
        ...

    @property
    def newer_tokens(self) -> Sequence[int]:
        """Tokens of each response that newer weights sampled than its first; empty unless weights change in flight."""
        ...


class Capacity(Protocol):
    """How much an engine computes at the same time."""

    @property
    def num_sequences(self) -> int:
        """The most sequences."""
        ...

    @property
    def cache_tokens(self) -> int:
        """The most tokens, prompts included; 0: unknown."""
        ...


class Drafts(Protocol):
    """How responses were generated with `rollout.speculative`; all 0 without."""

    @property
    def num_steps(self) -> int:
        """Steps of all responses together."""
        ...

    @property
    def num_drafted(self) -> int:
        """Those of them that checked drafts."""
        ...

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that the responses took over."""
        ...


class Reported(Protocol[B_co]):
    """What an engine reports: responses that are finished while it generates others, or that it was lost."""

    @property
    def rows(self) -> Sequence[int]:
        """Row numbers of the finished responses; empty if too few were finished in time."""
        ...

    @property
    def batch(self) -> B_co | None:
        """`Rollout.batch` for these rows; None without rows."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why the engine was lost; it generates no more under this number. None: it was not."""
        ...

    @property
    def are_rows_lost(self) -> bool:
        """Whether everything that it reported earlier was lost with it."""
        ...


class Generating(Protocol[B]):
    """One generation by the engines of a pool, from `RolloutPort.begin` on."""

    async def exchange(self, engine: int, rows: Sequence[int], prompts: B | None, num_rows: int) -> Reported[B]:
        """Give an engine more work, and return what it has finished meanwhile. A sample's seed depends only on the
        run's seed, step, prompt and sample number.

        Args:
            rows: numbers under which the engine reports the responses to `prompts`.
            prompts: None: no more work.
            num_rows: return when so many responses are finished, or after some seconds without any.
        """
        ...

    async def abort(self) -> None:
        """Drop what the engines have not finished, or not reported."""
        ...

    async def end(self) -> None:
        """Release what the engines need only for generation; they have no work left."""
        ...


class DataPort(Protocol[B]):
    """The prompts."""

    async def prompts(self, step: int, count: int | None = None) -> Prompts[B]:
        """Return the next prompts for a step. Steps are requested in order; the first follows the restored step.

        Args:
            count: number of prompts; fewer come at the end of an epoch. None: those of a whole batch.
        """
        ...

    async def give_back(self, step: int, used: int) -> None:
        """Keep only the first `used` prompts of `step`, the latest one; the next step gets the others first."""
        ...

    async def validation_prompts(self) -> Prompts[B]:
        """Return all validation prompts, each repeated for its samples."""
        ...

    async def keep(self, batch: B) -> B:
        """Return a copy of a batch that is lost only with the data's process."""
        ...

    async def state(self, step: int) -> Mapping[str, Any]:
        """Return the position after the last prompts for `step`, for a checkpoint."""
        ...

    async def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue after `step`, with the `state` that was saved for it."""
        ...


class RolloutPort(Protocol[B]):
    """The engines of a pool, which generate responses. New ones may be among them after each push of the weights, also
    in the middle of a generation if the job updates weights in flight."""

    @property
    def engines(self) -> Mapping[int, Capacity]:
        """The engines by number, without those that were lost. A number is never used again."""
        ...

    @property
    def num_lost(self) -> int:
        """Number of engines that were lost since the attempt began."""
        ...

    @property
    def comes_back(self) -> bool:
        """Whether lost engines come back, under other numbers: the pool is elastic."""
        ...

    def begin(self, step: int, *, is_validation: bool) -> Generating[B]:
        """Begin a generation; the one before must have ended.

        is_validation: sample with the parameters of validation, and keep what the next generation needs.
        """
        ...

    def take_drafts(self) -> Drafts:
        """Return how the responses that were reported since the last call were generated."""
        ...

    def joined(self, batch: B) -> Rollout[B]:
        """Return the responses of a generation, whose rows were generated in parts."""
        ...


class ActorPort(Protocol[B]):
    """The policy, which is trained."""

    async def compute_log_prob(self, batch: B) -> B:
        """Return old_log_probs."""
        ...

    def log_prob_metrics(self, computed: B) -> Metrics:
        """Return metrics of the difference between the rollout's log-probs and the computed ones."""
        ...

    async def update(self, batch: B) -> Metrics:
        """Update the policy on the whole batch: all epochs, all minibatches."""
        ...


class CriticPort(Protocol[B]):
    """The value model, which is trained."""

    async def compute_values(self, batch: B) -> B:
        """Return values."""
        ...

    async def update(self, batch: B) -> Metrics:
        """Update the critic on the whole batch: all epochs, all minibatches."""
        ...


class RefPort(Protocol[B]):
    """The reference policy."""

    async def compute_ref_log_prob(self, batch: B) -> B:
        """Return ref_log_prob."""
        ...


class ScoresPort(Protocol[B]):
    """A source of scores: the reward function or the reward model."""

    async def compute_scores(self, batch: B) -> B:
        """Return the scores of this source; they are token_level_scores if it is the only source."""
        ...

    def metrics(self, scores: B) -> Metrics:
        """Return the metrics that were collected while these scores were computed."""
        ...


class RewardPort(Protocol[B]):
    """The reward of a response, from a function, a model, or both."""

    @property
    def function(self) -> ScoresPort[B] | None:
        """The reward function, which runs on CPU cores."""
        ...

    @property
    def models(self) -> Mapping[str, ScoresPort[B]]:
        """The reward model in each of its pools, by the role under which its phases run; empty if there is none."""
        ...

    async def total(self, batch: B) -> tuple[B, Metrics]:
        """Return the batch with token_level_scores. It must have the scores of all sources."""
        ...

    def row_scores(self, batch: B) -> Sequence[float | None]:
        """Return the score of each row of a batch with token_level_scores; None: the reward dropped the response."""
        ...

    async def validate(self, batch: B, scores: Sequence[B]) -> Metrics:
        """Return the mean scores, `val-core/...`, over all rows and by data source.

        Args:
            scores: of each source: those of the function come first.
        """
        ...


class HookPort(Protocol[B]):
    """A method of a user-defined worker group, which a step calls at a fixed point."""

    @property
    def worker(self) -> str:
        """Name of the worker group."""
        ...

    @property
    def after(self) -> HookPoint:
        """The point."""
        ...

    async def call(self, batch: B, step: int) -> tuple[B, Metrics]:
        """Return the batch with the columns that the method returned, and its metrics."""
        ...


class AdvantagePort(Protocol[B]):
    """The group that computes advantages: the critic's, or the actor's if there is no critic."""

    async def compute_advantages(self, batch: B, kl_coefficient: float) -> tuple[B, Metrics]:
        """Return advantages and returns, and the statistics of the step's scores, rewards and values."""
        ...


@dataclass(frozen=True)
class Ports(Generic[B]):
    """Everything that one step calls. critic is None if the algorithm reads no values.

    refs: the reference in each of its pools, by the role under which its phases run; empty if the algorithm reads none.
    hooks: hooks of the same point are called in this order. shared: the engines in pools that are shared with the
    rollout, by the role under which their phases run.
    """

    data: DataPort[B]
    rollout: RolloutPort[B]
    actor: ActorPort[B]
    critic: CriticPort[B] | None
    refs: Mapping[str, RefPort[B]]
    reward: RewardPort[B]
    advantages: AdvantagePort[B]
    weights: WeightsPort
    hooks: Sequence[HookPort[B]] = ()
    shared: Mapping[str, RolloutPort[B]] = field(default_factory=dict)
