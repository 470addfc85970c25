"""The critic: values, their update, and the advantages, which are computed where the values are."""

from __future__ import annotations

from functools import cached_property

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.precision import dtype_of
from ppojob_trainer.engines.train.batch import EngineMeta
from ppojob_trainer.engines.train.engine import EngineSetup
from ppojob_trainer.engines.train.objectives import ValueObjective
from ppojob_trainer.protocol import SEQUENCES, DataProto, Keys
from ppojob_trainer.worker_groups.advantages import (
    READ_BY_ADVANTAGES,
    AdvantageSettings,
    compute_advantages,
    unread_by_advantages,
)
from ppojob_trainer.worker_groups.dispatch import Dispatch, Metrics, register
from ppojob_trainer.worker_groups.partition import balanced, in_groups, in_minibatches
from ppojob_trainer.worker_groups.roles.actor import reduce_metrics
from ppojob_trainer.worker_groups.roles.trained import EngineWorker, ModelSource, check_fit
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

__all__ = ["CriticGroup", "CriticWorker"]


class CriticWorker(EngineWorker):
    """One rank of the critic."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        super().__init__(context, spec, spec.critic)
        critic = spec.model.critic
        path = critic.path or spec.model.actor.path
        self.source = ModelSource(path, critic.trust_remote_code, has_output_layer=False, lora=critic.lora)

    @cached_property
    def setup(self) -> EngineSetup:
        """See `EngineWorker`."""
        spec = self.spec
        return EngineSetup(
            spec.model.critic.model_copy(update={"path": self.source.path}),
            spec.critic,
            ValueObjective(spec.critic),
            has_value_head=True,
            seed=spec.trainer.seed,
            dtype=dtype_of(spec.device),
            per_host=self.context.local_world_size,
        )

    @register(dispatch=Dispatch.RANK_ZERO)
    def check(self) -> None:
        """Check the model without loading it.

        Raises:
            ModelNotFoundError: there is no model at the path.
            ModelUnsupportedError: a part of the model is not supported.
            ModelMismatchError: the model does not fit the job, or cannot be divided as the spec asks.
        """
        self.engine.check()
        check_fit("critic", self.source, self.spec)

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO, reads=SEQUENCES)
    def compute_values(self, batch: DataProto) -> DataProto:
        """Return values."""
        return self.engine.forward(batch)

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO, reads=READ_BY_ADVANTAGES)
    def compute_advantages(self, batch: DataProto, kl_coefficient: float) -> DataProto:
        """Return advantages and returns."""
        return compute_advantages(batch, AdvantageSettings.of(self.spec), kl_coefficient, self.parallel)

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC, reads=(*SEQUENCES, Keys.VALUES, Keys.RETURNS))
    def update_critic(self, batch: DataProto) -> Metrics:
        """Run the value loss's minibatches on the batch."""
        return self.engine.update(batch)


class CriticGroup:
    """The critic as the controller calls it."""

    def __init__(self, group: WorkerGroup[CriticWorker], spec: PPOJobSpec) -> None:
        self.group = group.with_peers(spec.critic.num_peers, spec.critic.pipeline_parallel_size)
        self._samples = spec.rollout.samples_per_prompt
        self._minibatch_rows = spec.critic.mini_batch_size * self._samples
        num_minibatches = spec.data.train_batch_size // spec.critic.mini_batch_size
        self._updating = {
            EngineMeta.NUM_MINI_BATCHES: num_minibatches,
            EngineMeta.EPOCHS: spec.algorithm.epochs,
            EngineMeta.RESPONSE_LENGTH: spec.data.max_response_length,
        }
        self._unread_by_advantages = unread_by_advantages(AdvantageSettings.of(spec))

    async def compute_values(self, batch: Table) -> Table:
        """See `CriticPort`."""
        group = self.group.over(balanced(batch.tokens, self.group.num_shards))
        return await group.call(CriticWorker.compute_values, batch)

    async def compute_advantages(self, batch: Table, kl_coefficient: float) -> tuple[Table, dict[str, float]]:
        """See `AdvantagePort`."""
        group = self.group.over(in_groups(len(batch), self._samples, self.group.num_shards))
        found = await group.call(CriticWorker.compute_advantages, batch, kl_coefficient)
        return found, reduce_metrics(found)

    async def update(self, batch: Table) -> dict[str, float]:
        """See `CriticPort`."""
        partition = in_minibatches(batch.tokens, self._minibatch_rows, self.group.num_shards)
        return await self.group.over(partition).using(self._updating).call(CriticWorker.update_critic, batch)
