"""The reward: a user's function, run by reward workers over parts of the batch, a model, or the sum of both.

With onError Drop the scores include a `response_mask` that is 0 for responses that the function did not score. It
replaces the rollout's mask, so advantages and losses leave these responses out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ppojob_api.v1alpha1.reward import OnError, RewardWeights
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.protocol import SEQUENCES, DataProto, Keys, Meta, object_array
from ppojob_trainer.rewards import FunctionSource, RewardFunctionError, Scorer
from ppojob_trainer.rewards.batch import (
    COUNT_PREFIX,
    MIXTURE_PREFIX,
    REWARD_PREFIX,
    SOURCE_PREFIX,
    Decoder,
    counts_of,
    numbers_by_source,
    numbers_in,
    score_batch,
    scores_by_source,
)
from ppojob_trainer.rewards.samples import sampled_rows
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.errors import NotRenewableError
from ppojob_trainer.worker_groups.partition import spread
from ppojob_trainer.worker_groups.roles.data import load_tokenizer
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

if TYPE_CHECKING:
    # With it come FSDP and torch's compiler, a quarter of the start of a reward worker.
    from ppojob_trainer.worker_groups.roles.reward_model import ModelScores

__all__ = ["FunctionScores", "RewardGroup", "RewardWorker"]


class RewardWorker:
    """Scores its rows with the reward function."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        self.spec = spec
        self._scorer: Scorer | None = None
        self._decoder: Decoder | None = None

    def renew(self) -> None:
        """See `Renewable`: no score depends on an earlier one."""
        if self._scorer is None:
            raise NotRenewableError("the reward function was not loaded yet")

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def load_tokenizer(self) -> None:
        """Load the tokenizer. Once. Its libraries take seconds, so this runs while the data are opened.

        Raises:
            ModelNotFoundError: no tokenizer in the actor's folder.
        """
        if self._decoder is None:
            self._decoder = load_tokenizer(self.spec.model.actor)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def load(self, data_sources: Sequence[str]) -> None:
        """Start the function's processes, and check the names of the data sets with it. Once.

        Raises:
            RewardImportError: the function cannot be imported.
            RewardRefusedError: the function's check refuses its arguments or a data set.
        """
        if self._scorer is not None:
            return
        function = self.spec.reward.function
        assert function is not None, "this reward has no function"
        source = FunctionSource(function.module, function.path, function.name, function.extract, function.kwargs)
        scorer = Scorer(
            source,
            on_error=function.on_error.value,
            error_score=function.error_score,
            timeout_seconds=function.timeout_seconds,
            concurrency=function.concurrency,
        )
        scorer.start(data_sources)
        self._scorer = scorer

    @register(
        dispatch=Dispatch.DP_COMPUTE_PROTO,
        reads=(*SEQUENCES, Keys.SOURCE, Keys.DATA_SOURCE, Keys.INDEX, Keys.GROUND_TRUTH, Keys.EXTRA_INFO),
    )
    def compute_scores(self, batch: DataProto) -> DataProto:
        """Return the scores, token_level_scores, or function_scores if a model scores too; reward_error, reward_extras.

        The metrics are the scores of each data source, the further numbers that the function returned, in a mixture for
        each source too, and the number of responses that it did not score.

        Raises:
            RewardFunctionError: with onError Fail, the function did not score a response.
        """
        assert self._scorer is not None, "load() comes first"
        assert self._decoder is not None, "load_tokenizer() comes first"
        scored = score_batch(batch, self._scorer, self._decoder)
        kept = scored.kept
        metrics = {
            **scores_by_source(batch[kept], scored.scores.take(kept.nonzero().flatten())),
            **numbers_in(scored.extras),
            **numbers_by_source(batch, scored.extras),
            **counts_of(scored.results),
        }
        name = Keys.FUNCTION_SCORES if self.spec.reward.uses_model else Keys.TOKEN_LEVEL_SCORES
        tensors = {name: scored.scores}
        if _on_error(self.spec) is OnError.DROP:
            mask = batch.ragged(Keys.RESPONSE_MASK)
            tensors[Keys.RESPONSE_MASK] = mask.with_values(mask.values & kept[mask.row_of])
        texts = {Keys.REWARD_ERROR: object_array(scored.errors), Keys.REWARD_EXTRAS: object_array(scored.extras)}
        return DataProto.from_dict(tensors, texts, meta_info={Meta.METRICS: metrics})

    @register(
        dispatch=Dispatch.DP_COMPUTE_PROTO,
        reads=(Keys.RESPONSE_MASK, Keys.DATA_SOURCE, Keys.FUNCTION_SCORES, Keys.MODEL_SCORES),
    )
    def add_scores(self, batch: DataProto) -> DataProto:
        """Return token_level_scores, the weighted sum of function_scores and model_scores, with metrics of each."""
        of_function, of_model = batch.ragged(Keys.FUNCTION_SCORES), batch.ragged(Keys.MODEL_SCORES)
        sums = weighted(of_function.values, of_model.values, self.spec.reward.weights or RewardWeights())
        total = of_function.with_values(sums)
        kept = batch.ragged(Keys.RESPONSE_MASK).any().nonzero().flatten()
        metrics = scores_by_source(batch[kept], total.take(kept))
        for name, scores in (("function", of_function), ("model", of_model)):
            metrics[f"{REWARD_PREFIX}{name}"] = scores.take(kept).sums().tolist()
        return DataProto.from_dict({Keys.TOKEN_LEVEL_SCORES: total}, meta_info={Meta.METRICS: metrics})


def weighted(of_function: Tensor, of_model: Tensor, weights: RewardWeights) -> Tensor:
    """Return the weighted sum of two scores of each token."""
    return weights.function * of_function + weights.model * of_model


def _on_error(spec: PPOJobSpec) -> OnError:
    return OnError.FAIL if spec.reward.function is None else spec.reward.function.on_error


class FunctionScores:
    """The reward function as the controller calls it."""

    def __init__(self, group: WorkerGroup[RewardWorker], spec: PPOJobSpec) -> None:
        self.group = group
        self._drops = _on_error(spec) is OnError.DROP

    async def compute_scores(self, batch: Table) -> Table:
        """See `ScoresPort`. With onError Drop the table's `response_mask` replaces that of the rollout."""
        scores = await self._over(batch).call(RewardWorker.compute_scores, batch)
        return scores.replacing() if self._drops else scores

    def metrics(self, scores: Table) -> dict[str, float]:
        """See `ScoresPort`."""
        found = scores.metrics
        return {**means_of(found, REWARD_PREFIX), **means_of(found, MIXTURE_PREFIX), **sums_of(found)}

    async def add(self, batch: Table) -> Table:
        """Return token_level_scores of rows that have both scores."""
        return await self._over(batch).call(RewardWorker.add_scores, batch)

    def _over(self, batch: Table) -> WorkerGroup[RewardWorker]:
        return self.group.over(spread(len(batch), len(self.group)))


class RewardGroup:
    """The whole reward as the controller calls it: a function, a model, or the sum of both."""

    def __init__(
        self,
        function: FunctionScores | None,
        models: Mapping[str, ModelScores],
        spec: PPOJobSpec,
        write_samples: Callable[[Table], Awaitable[object]],
    ) -> None:
        """
        Args:
            models: the copies of the reward model, by role.
            write_samples: writes rows with scores into `samples.jsonl`. One process does, because no worker may have
                scored enough of them.
        """
        self.function = function
        self.models = models
        self._write_samples = write_samples
        self._num_samples = spec.telemetry.samples_per_step
        self._validation_samples = spec.rollout.validation.samples_per_prompt

    async def total(self, batch: Table) -> tuple[Table, dict[str, float]]:
        """See `RewardPort`."""
        metrics: dict[str, float] = {}
        if self.function is not None and self.models:
            table = await self.function.add(batch)
            batch, metrics = batch.union(table), means_of(table.metrics, REWARD_PREFIX)
        await self._sample(batch)
        return batch, metrics

    def row_scores(self, batch: Table) -> list[float | None]:
        """See `RewardPort`."""
        scores, tokens = batch.sums[Keys.TOKEN_LEVEL_SCORES], batch.sums[Keys.RESPONSE_MASK]
        return [score if kept else None for score, kept in zip(scores, tokens, strict=True)]

    async def validate(self, batch: Table, scores: Sequence[Table]) -> dict[str, float]:
        """See `RewardPort`. `val-core/<source>/score/mean@<samples>` as in verl, and the mean over all sources.

        Raises:
            RewardFunctionError: the function dropped all responses.
        """
        # The function's table comes first.
        total, counts = scores[0], sums_of(scores[0].metrics)
        scored = batch.union(*scores)
        if self.function is not None and self.models:
            total = await self.function.add(scored)
            scored = scored.union(total)
        await self._sample(scored)
        means = means_of(total.metrics, SOURCE_PREFIX, suffix="")
        everything = [value for name, values in total.metrics.items() if is_source(name) for value in values]
        if not everything:
            raise RewardFunctionError(
                "the reward function dropped all responses of the validation (reward.function.onError: Drop): correct "
                "the function; the reward workers' logs have the errors",
                -1,
            )
        return {
            **{
                f"val-core/{name.removeprefix(SOURCE_PREFIX)}/score/mean@{self._validation_samples}": mean
                for name, mean in means.items()
            },
            "val-core/score/mean": sum(everything) / len(everything),
            **{f"val-aux/{name}": count for name, count in counts.items()},
        }

    async def _sample(self, batch: Table) -> None:
        """Write some rows of a batch, whichever workers scored them; first those that the function did not score."""
        failed = [row for row, is_failed in enumerate(batch.sums.get(Keys.REWARD_ERROR, ())) if is_failed]
        if rows := sampled_rows(len(batch), self._num_samples, failed):
            await self._write_samples(batch.take(rows))


def is_source(name: str) -> bool:
    """Whether a metric of a scored batch holds the scores of a data source."""
    return name.startswith(SOURCE_PREFIX)


def means_of(metrics: Mapping[str, Sequence[float]], prefix: str, suffix: str = "/mean") -> dict[str, float]:
    """Return the mean of each metric whose name begins with `prefix`."""
    return {
        f"{name}{suffix}": sum(values) / len(values)
        for name, values in metrics.items()
        if name.startswith(prefix) and values
    }


def sums_of(metrics: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the counts of a scored batch: `reward/errors`, `reward/timeouts`, `reward/dropped`."""
    return {
        f"{REWARD_PREFIX}{name.removeprefix(COUNT_PREFIX)}": sum(values)
        for name, values in metrics.items()
        if name.startswith(COUNT_PREFIX)
    }
