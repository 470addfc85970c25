"""The reward: a function of the user's, run by CPU processes over parts of the batch."""

from __future__ import annotations

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.protocol import DataProto, Keys, Meta
from ppojob_trainer.rewards import Scorer, load_reward_function
from ppojob_trainer.rewards.batch import Decoder, score_batch
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.partition import spread
from ppojob_trainer.worker_groups.roles.data import load_tokenizer
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import Seat

__all__ = ["RewardGroup", "RewardWorker"]


class RewardWorker:
    """Scores the rows that it is sent."""

    def __init__(self, seat: Seat, spec: PPOJobSpec) -> None:
        self.spec = spec
        self._scorer: Scorer | None = None
        self._decoder: Decoder | None = None

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def load(self) -> None:
        """Import the function and load the tokenizer.

        Raises:
            RewardImportError: the function cannot be had.
            ModelNotFoundError: no tokenizer in the actor's folder.
        """
        function = self.spec.reward.function
        self._scorer = Scorer(
            load_reward_function(function.module, function.path, function.name, function.extract, function.kwargs),
            on_error=function.on_error.value,
            error_score=function.error_score,
            timeout_seconds=function.timeout_seconds,
        )
        self._decoder = load_tokenizer(self.spec.model.actor)

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def compute_scores(self, batch: DataProto) -> DataProto:
        """Return token_level_scores; the metrics hold the scores of each data source, row by row.

        Raises:
            RewardError: the function raised or was too slow.
        """
        assert self._scorer is not None, "load() comes first"
        assert self._decoder is not None, "load() comes first"
        scores = score_batch(batch, self._scorer, self._decoder).tensor(Keys.TOKEN_LEVEL_SCORES)
        by_source: dict[str, list[float]] = {}
        for source, score in zip(batch.array(Keys.DATA_SOURCE), scores.sum(dim=1).tolist(), strict=True):
            by_source.setdefault(str(source), []).append(score)
        return DataProto.from_dict({Keys.TOKEN_LEVEL_SCORES: scores}, meta_info={Meta.METRICS: by_source})


class RewardGroup:
    """The reward as the controller calls it."""

    def __init__(self, group: WorkerGroup[RewardWorker], spec: PPOJobSpec) -> None:
        self.group = group
        self._validation_samples = spec.rollout.validation.samples_per_prompt

    async def compute_scores(self, batch: Table) -> Table:
        """See `RewardPort`."""
        group = self.group.over(spread(len(batch), len(self.group)))
        return await group.call(RewardWorker.compute_scores, batch)

    async def validate(self, batch: Table) -> dict[str, float]:
        """See `RewardPort`. `val-core/<source>/score/mean@<samples>` as verl has it, and the mean over all sources."""
        by_source = (await self.compute_scores(batch)).metrics
        everything = [score for scores in by_source.values() for score in scores]
        means = {
            f"val-core/{source}/score/mean@{self._validation_samples}": sum(scores) / len(scores)
            for source, scores in by_source.items()
        }
        return {**means, "val-core/score/mean": sum(everything) / len(everything)}
