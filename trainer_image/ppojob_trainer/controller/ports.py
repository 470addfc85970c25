"""What the controller calls: Protocols, which the worker groups implement and the tests fake.

`main` plugs the implementations in. A batch is opaque here: its rows lie in the workers, the controller joins columns
and passes it on. What the controller does see are ids, lengths, scalars and metrics.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from ppojob_api.v1alpha1.progress import Activity, LiveSettings
from ppojob_api.v1alpha1.workers import HookPoint

Metrics = Mapping[str, float]


class Batch(Protocol):
    """Rows (sequences) with columns. Its data may not be computed yet."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def union(self, *others: Self) -> Self:
        """Return the columns of all, side by side."""
        ...

    def replaced_by(self, other: Self) -> Self:
        """Return the columns of both; of those that both have, the other's."""
        ...

    def take(self, rows: Sequence[int]) -> Self:
        """Return these rows, in this order."""
        ...

    def join_rows(self, others: Sequence[Self], numbers: Sequence[int]) -> Self:
        """Return the rows of this and of the others as one; `numbers` are theirs there, in the order they come in."""
        ...


B = TypeVar("B", bound=Batch)
B_co = TypeVar("B_co", bound=Batch, covariant=True)


class Prompts(Protocol[B_co]):
    """The prompts of one step, each repeated for its samples."""

    @property
    def batch(self) -> B_co:
        """prompt_ids, uid, sample_index, and what the reward is told."""
        ...

    @property
    def epoch(self) -> int:
        """Pass over the data that they belong to, from 0."""
        ...


class Rollout(Protocol[B_co]):
    """Responses to prompts, row by row."""

    @property
    def batch(self) -> B_co:
        """The tokens of prompts and responses, their masks, and the rollout's log-probs."""
        ...

    @property
    def prompt_lengths(self) -> Sequence[int]:
        """Tokens of each prompt."""
        ...

    @property
    def response_lengths(self) -> Sequence[int]:
        """Tokens of each response."""
        ...


class Finished(Protocol[B_co]):
    """Responses that are finished while others are still being written."""

    @property
    def rows(self) -> Sequence[int]:
        """Which rows of the prompts they belong to."""
        ...

    @property
    def batch(self) -> B_co:
        """As `Rollout.batch`, of these rows."""
        ...


class DataPort(Protocol[B_co]):
    """The prompts."""

    async def prompts(self, step: int) -> Prompts[B_co]:
        """Return the prompts of a step; steps come in order, from the one after the restored."""
        ...

    async def validation_prompts(self) -> B_co:
        """Return all validation prompts, each repeated for its samples."""
        ...

    async def state(self, step: int) -> Mapping[str, Any]:
        """Return the position after the prompts of `step`, for a checkpoint."""
        ...

    async def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on after `step`."""
        ...


class RolloutPort(Protocol[B]):
    """The engines of a pool, which write responses."""

    @property
    def num_replicas(self) -> int:
        """Engines that write at the same time."""
        ...

    async def generate(self, prompts: B, step: int) -> Rollout[B]:
        """Write a response to each row; each sample's seed depends on run seed, step, prompt and sample only."""
        ...

    def stream(self, prompts: B, step: int) -> AsyncIterator[Finished[B]]:
        """Write the same responses as `generate`, and yield them in the order in which they are finished."""
        ...

    def joined(self, batch: B) -> Rollout[B]:
        """Return what `generate` would have, from rows that were written in parts."""
        ...

    async def generate_for_validation(self, prompts: B) -> Rollout[B]:
        """Write a response to each row, with the sampling of validation."""
        ...


class ActorPort(Protocol[B]):
    """The policy that is trained."""

    async def compute_log_prob(self, batch: B) -> B:
        """Return old_log_probs."""
        ...

    def log_prob_metrics(self, computed: B) -> Metrics:
        """Say how far the rollout's log-probs are from those that were computed."""
        ...

    async def update(self, batch: B) -> Metrics:
        """Update the policy on the whole batch: all epochs, all minibatches."""
        ...


class CriticPort(Protocol[B]):
    """The value model that is trained."""

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
    """One way of scoring: the reward function or the reward model."""

    async def compute_scores(self, batch: B) -> B:
        """Return this way's scores, which are token_level_scores where it is the only way."""
        ...

    def metrics(self, scores: B) -> Metrics:
        """Return what was measured while these scores were computed."""
        ...


class RewardPort(Protocol[B]):
    """What a response is worth, by a function, a model, or both."""

    @property
    def function(self) -> ScoresPort[B] | None:
        """The reward function, which takes no GPU."""
        ...

    @property
    def model(self) -> ScoresPort[B] | None:
        """The reward model, which computes in its pool."""
        ...

    async def total(self, batch: B) -> tuple[B, Metrics]:
        """Return the batch, which has the scores of all ways, with token_level_scores."""
        ...

    async def validate(self, batch: B) -> Metrics:
        """Return the mean scores, `val-core/...`, over all rows and by data source."""
        ...


class HookPort(Protocol[B]):
    """A method of a user's own worker group, which a step calls at a fixed point."""

    @property
    def worker(self) -> str:
        """Name of the worker group."""
        ...

    @property
    def after(self) -> HookPoint:
        """The point."""
        ...

    async def call(self, batch: B, step: int) -> tuple[B, Metrics]:
        """Return the batch with the columns that the method gave, and its metrics."""
        ...


class AdvantagePort(Protocol[B]):
    """Where advantages are computed: the critic's group, or the actor's where there is no critic."""

    async def compute_advantages(self, batch: B, kl_coefficient: float) -> tuple[B, Metrics]:
        """Return advantages and returns, and the statistics of the step's scores, rewards and values."""
        ...


class WeightsPort(Protocol):
    """The way of the policy's weights to the rollout engines."""

    @property
    def are_given_up(self) -> bool:
        """Whether engines give the weights up once they have generated, and need even unchanged ones again.

        Then a push takes memory in every pool that has engines.
        """
        ...

    async def push(self, version: int) -> Metrics:
        """Make the engines generate with the policy as it is now; checked before it returns what it moved."""
        ...


@dataclass(frozen=True)
class Ports(Generic[B]):
    """All that one step calls. critic and ref are None where the algorithm reads neither values nor a reference.

    hooks: in the order in which those of the same point are called. lent: the engines in pools that are lent to the
    rollout, by the role under which their phases run.
    """

    data: DataPort[B]
    rollout: RolloutPort[B]
    actor: ActorPort[B]
    critic: CriticPort[B] | None
    ref: RefPort[B] | None
    reward: RewardPort[B]
    advantages: AdvantagePort[B]
    weights: WeightsPort
    hooks: Sequence[HookPort[B]] = ()
    lent: Mapping[str, RolloutPort[B]] = field(default_factory=dict)


class CheckpointPort(Protocol):
    """The state of the models and of the run, in the storage."""

    async def restore(self) -> tuple[int, Mapping[str, Any]] | None:
        """Load the checkpoint to go on from; return its step and the state it was saved with, or None."""
        ...

    async def stage(self, step: int, *, in_background: bool) -> None:
        """Take the models as they are into a new checkpoint; afterwards they may change.

        Args:
            in_background: return before all is written; `commit` waits for the rest.
        """
        ...

    async def commit(self, step: int, state: Mapping[str, Any], keep: int) -> str:
        """Wait until all of it is written, make it the newest with this state of the run; return where it is."""
        ...

    async def export(self) -> Path:
        """Write the policy as a HuggingFace folder; return it."""
        ...


class MonitorPort(Protocol):
    """Who is told what the run does, and who tells it to stop."""

    @property
    def settings(self) -> LiveSettings:
        """The part of the spec that may change while the job runs, as last heard."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether the run shall stop in order."""
        ...

    @property
    def checkpoint_request(self) -> str | None:
        """The request for a checkpoint that was heard last; it stays until its answer has gone round. None: none."""
        ...

    async def wait_for_stop(self) -> None:
        """Return when the run shall stop."""
        ...

    def set_activity(self, activity: Activity) -> None:
        """Tell what the run does now."""
        ...

    def resumed(self, step: int) -> None:
        """Tell that the run goes on after `step`."""
        ...

    def record(self, step: int, metrics: Metrics) -> None:
        """Tell the metrics of a step that is done; step 0 is the validation before training."""
        ...

    def saved(self, step: int, location: str, request: str | None) -> None:
        """Tell of a checkpoint, and of the last request that was heard before it was written."""
        ...

    def exported(self, path: Path) -> None:
        """Tell of the exported policy."""
        ...
