"""The reward model: ranks that score responses with one sharded sequence classifier, in each pool of the reward.

The policy's tokenizer turns a response into text, and the reward model's tokenizer turns prompt and response into its
input (`rewards.model_input`), so the two models may have different vocabularies.
"""

from __future__ import annotations

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.precision import dtype_of
from ppojob_trainer.engines.train.engine import ScoringEngine
from ppojob_trainer.engines.train.loader import check_reward_model, load_reward_model
from ppojob_trainer.protocol import SEQUENCES, DataProto, Keys, Meta
from ppojob_trainer.rewards.batch import (
    REWARD_PREFIX,
    Decoder,
    response_texts,
    scores_by_source,
    scores_on_last_token,
)
from ppojob_trainer.rewards.errors import RewardModelError
from ppojob_trainer.rewards.model_input import ModelInput
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.partition import balanced
from ppojob_trainer.worker_groups.roles.data import load_tokenizer
from ppojob_trainer.worker_groups.roles.trained import ModelSource, TrainedWorker
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

__all__ = ["ModelScores", "RewardModelWorker"]

_READ = (*SEQUENCES, Keys.DATA_SOURCE, Keys.INDEX, Keys.RAW_PROMPT)


class RewardModelWorker(TrainedWorker):
    """One rank of the reward model."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        super().__init__(context, spec)
        assert spec.model.reward is not None, "this reward has no model"
        self._model = spec.model.reward
        # Without its output layer, which is negligible: one row per label.
        self.source = ModelSource(self._model.path, self._model.trust_remote_code, has_output_layer=False)
        self._input: ModelInput | None = None
        self._decoder: Decoder | None = None
        self._engine: ScoringEngine | None = None

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def check(self) -> None:
        """Read the configuration, and load both tokenizers.

        Raises:
            ModelNotFoundError: there is no model or no tokenizer at a path.
            ModelUnsupportedError: it is not a sequence classifier, or has no such label.
            RewardModelError: the spec asks for a chat template and there is none.
        """
        from ppojob_trainer.engines.train.model_fit import longest_input

        model = self._model
        config = check_reward_model(model)
        self._input = ModelInput(load_tokenizer(model), model.input, model.max_length or longest_input(config))
        self._decoder = load_tokenizer(self.spec.model.actor)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def load(self) -> None:
        """Load and shard the model, after `check` and `join`. Once."""
        if self._is_loaded:
            return
        self._engine = load_reward_model(self._model, self.parallel, dtype_of(self.spec.device))
        self._is_loaded = True

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO, reads=_READ)
    def compute_scores(self, batch: DataProto) -> DataProto:
        """Return the scores, and as metrics those of each data source. Collective.

        The field is token_level_scores, or model_scores if a function scores too.

        Raises:
            RewardModelError: the chat template refuses a conversation, or a score is not finite.
        """
        assert self._engine is not None, "load() comes first"
        assert self._input is not None, "check() comes first"
        assert self._decoder is not None, "check() comes first"
        indices = batch.array(Keys.INDEX).tolist()
        token_lists = self._input.token_ids(
            batch.array(Keys.RAW_PROMPT).tolist(), response_texts(batch, self._decoder), indices
        )
        scores = self._engine.score(token_lists)
        for index, score in zip(indices, scores.tolist(), strict=True):
            if score - score != 0:
                raise RewardModelError(f"the reward model's score of prompt {index} is {score}: it must be finite")
        mask = batch.ragged(Keys.RESPONSE_MASK)
        placed = scores_on_last_token(scores, mask)
        # Copies that pad a rank's share have no response tokens.
        is_row = mask.any().tolist()
        kept = mask.any().nonzero().flatten()
        metrics = scores_by_source(batch[kept], placed.take(kept))
        longest = self._input.max_length
        metrics[f"{REWARD_PREFIX}clip_ratio"] = [
            float(len(tokens) >= longest) for tokens, counts in zip(token_lists, is_row, strict=True) if counts
        ]
        name = Keys.MODEL_SCORES if self.spec.reward.uses_function else Keys.TOKEN_LEVEL_SCORES
        return DataProto.from_dict({name: placed}, meta_info={Meta.METRICS: metrics})


class ModelScores:
    """The reward model as the controller calls it."""

    def __init__(self, group: WorkerGroup[RewardModelWorker]) -> None:
        self.group = group

    async def compute_scores(self, batch: Table) -> Table:
        """See `ScoresPort`."""
        group = self.group.over(balanced(batch.tokens, len(self.group)))
        return await group.call(RewardModelWorker.compute_scores, batch)

    def metrics(self, scores: Table) -> dict[str, float]:
        """See `ScoresPort`."""
        clipped = scores.metrics.get(f"{REWARD_PREFIX}clip_ratio", [])
        return {f"{REWARD_PREFIX}clip_ratio": sum(clipped) / len(clipped)} if clipped else {}
