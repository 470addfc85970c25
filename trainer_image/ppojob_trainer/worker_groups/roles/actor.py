"""The actor: the policy that is trained, its log-probs, its weights for the rollout, its checkpoints and export."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.algorithms import try_functions
from ppojob_trainer.engines.precision import dtype_of
from ppojob_trainer.engines.train.batch import EngineMeta
from ppojob_trainer.engines.train.engine import EngineSetup
from ppojob_trainer.engines.train.objectives import PolicyObjective
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.plans import LinkPlan, WeightLink
from ppojob_trainer.engines.weights.receipts import Receipt
from ppojob_trainer.engines.weights.sender import WeightSender
from ppojob_trainer.maths.masked import Moments
from ppojob_trainer.protocol import SEQUENCES, DataProto, Keys, Meta
from ppojob_trainer.worker_groups.advantages import (
    READ_BY_ADVANTAGES,
    AdvantageSettings,
    Ranks,
    compute_advantages,
    unread_by_advantages,
    with_metrics,
)
from ppojob_trainer.worker_groups.dispatch import Dispatch, Metrics, merge_metrics, register
from ppojob_trainer.worker_groups.partition import balanced, in_groups, in_minibatches
from ppojob_trainer.worker_groups.roles.trained import EngineWorker, ModelSource, check_fit
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

__all__ = ["ActorGroup", "ActorWorker"]

READ_BY_UPDATE = (
    *SEQUENCES,
    Keys.ADVANTAGES,
    Keys.OLD_LOG_PROBS,
    Keys.REF_LOG_PROB,
    Keys.ROLLOUT_LOG_PROBS,
    Keys.ROUTED_EXPERTS,
)
"""ref_log_prob and rollout_log_probs only with some algorithms, see `unread_by_update`."""
_ELASTIC_LIMIT_S = 120.0
"""Seconds that the ends of a weight link wait for each other, if the receiver may be lost at any time."""
_LINK_SHARE = 0.75
"""Of the time limit of a phase, for the ends of a weight link. The rest is for a push to the other engines. In a fixed
pool, an engine that rounds weights is lost first, because it has half of the phase's limit."""


class ActorWorker(EngineWorker):
    """One rank of the policy."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        super().__init__(context, spec, spec.actor)
        actor = spec.model.actor
        self.source = ModelSource(actor.path, actor.trust_remote_code, lora=actor.lora)
        self._sender: WeightSender | None = None

    @cached_property
    def setup(self) -> EngineSetup:
        """See `EngineWorker`."""
        spec = self.spec
        objective = PolicyObjective(spec.actor, spec.algorithm)
        return EngineSetup(
            spec.model.actor,
            spec.actor,
            objective,
            seed=spec.trainer.seed,
            dtype=dtype_of(spec.device),
            per_host=self.context.local_world_size,
            replays_experts=spec.rollout.routing_replay,
        )

    @register(dispatch=Dispatch.RANK_ZERO)
    def check(self) -> None:
        """Check the model without loading it, and call the user's estimator and policy loss with a small batch.

        Raises:
            AlgorithmFunctionError: a user's function cannot be used.
            ModelNotFoundError: there is no model at the path.
            ModelUnsupportedError: a part of the model is not supported.
            ModelMismatchError: the model does not fit the job, or cannot be divided as the spec asks.
        """
        from ppojob_trainer.engines.train.model_fit import (
            check_engine_parts,
            check_is_balanced,
            check_is_mixture,
            check_quantization,
            read_config,
        )

        try_functions(self.spec.algorithm)
        self.engine.check()
        config = read_config(self.source.path, trust_remote_code=self.source.trust_remote_code)
        check_engine_parts(config, self.spec.rollout)
        if self.spec.rollout.routing_replay:
            check_is_mixture(config, "rollout.routingReplay", "true", "set it to false")
        check_quantization(config, self.spec.rollout.quantization)
        if coefficient := self.spec.actor.router_aux_loss_coefficient:
            check_is_balanced(config, "actor.routerAuxLossCoefficient", coefficient, "set it to 0")
        check_fit("actor", self.source, self.spec)

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO, reads=(*SEQUENCES, Keys.ROLLOUT_LOG_PROBS, Keys.ROUTED_EXPERTS))
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return old_log_probs; the metrics have their difference from the rollout's log-probs."""
        self.check_recording(batch)
        found = self.engine.forward(batch).select([Keys.OLD_LOG_PROBS])
        difference = {}
        if Keys.ROLLOUT_LOG_PROBS in batch:
            difference = rollout_difference(batch.with_fields(found.columns), self.parallel)
        return with_metrics(found.columns, difference)

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO, reads=(*SEQUENCES, Keys.ROUTED_EXPERTS))
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return ref_log_prob, by the policy with its adapters off."""
        self.check_recording(batch)
        return as_ref_log_prob(self.engine.forward(batch, with_adapters=False))

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC, reads=READ_BY_UPDATE)
    def update_actor(self, batch: DataProto) -> Metrics:
        """Run PPO's minibatches on the batch."""
        self.check_recording(batch)
        return self.engine.update(batch)

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO, reads=READ_BY_ADVANTAGES)
    def compute_advantages(self, batch: DataProto, kl_coefficient: float) -> DataProto:
        """Return advantages and returns, for estimators without a critic."""
        return compute_advantages(batch, AdvantageSettings.of(self.spec), kl_coefficient, self.parallel)

    @property
    def _link_limit_s(self) -> float:
        """How long one end waits for the other. An engine of an elastic pool may be lost while it receives weights."""
        is_elastic = any(self.spec.pool(name).elastic for name in self.spec.placement.rollout_pools)
        limit_s = _LINK_SHARE * self.context.timeout_s
        return min(limit_s, _ELASTIC_LIMIT_S) if is_elastic else limit_s

    @register(dispatch=Dispatch.ALL_TO_ALL)
    def open_weights(self, plans: Sequence[LinkPlan]) -> list[WeightLink]:
        """Open the weight links, one for each plan; a rank without a plan only takes part in gathering.

        Earlier links are closed.
        """
        if self._sender is not None:
            self._sender.close()
        self._sender = WeightSender(
            self.engine.weights(), plans, self.context.address, self._link_limit_s, device=self.parallel.device
        )
        return self._sender.listen()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def connect_weights(self) -> Transports:
        """Wait for the replicas, which connect at the same time; return the transports from this rank to them."""
        assert self._sender is not None, "open_weights() comes first"
        return self._sender.prepare()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def push_weights(self, version: int, is_partial: bool) -> list[Receipt]:
        """Send the weights while the replicas receive them; return a receipt for each plan of this rank.

        Args:
            is_partial: without what training never changes.
        """
        assert self._sender is not None, "open_weights() comes first"
        return self._sender.push(version, is_partial=is_partial)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def export(self, folder: Path) -> None:
        """Write the policy as a HuggingFace folder."""
        self.engine.export(folder)


class ActorGroup:
    """The actor as the controller calls it."""

    def __init__(self, group: WorkerGroup[ActorWorker], spec: PPOJobSpec) -> None:
        self.group = group.with_peers(spec.actor.num_peers, spec.actor.pipeline_parallel_size).using(
            {Meta.TEMPERATURE: spec.rollout.temperature}
        )
        self._samples = spec.rollout.samples_per_prompt
        self._minibatch_rows = spec.actor.mini_batch_size * self._samples
        num_minibatches = spec.data.train_batch_size // spec.actor.mini_batch_size
        self._updating = {
            EngineMeta.NUM_MINI_BATCHES: num_minibatches,
            EngineMeta.EPOCHS: spec.algorithm.epochs,
            EngineMeta.RESPONSE_LENGTH: spec.data.max_response_length,
        }
        self._unread_by_update = unread_by_update(spec.algorithm)
        self._unread_by_advantages = unread_by_advantages(AdvantageSettings.of(spec))

    async def compute_log_prob(self, batch: Table) -> Table:
        """See `ActorPort`."""
        group = self.group.over(balanced(batch.tokens, self.group.num_shards))
        return await group.call(ActorWorker.compute_log_prob, batch)

    def log_prob_metrics(self, computed: Table) -> dict[str, float]:
        """See `ActorPort`."""
        return reduce_metrics(computed)

    async def update(self, batch: Table) -> dict[str, float]:
        """See `ActorPort`."""
        partition = in_minibatches(batch.tokens, self._minibatch_rows, self.group.num_shards)
        group = self.group.over(partition).using(self._updating).without(self._unread_by_update)
        return await group.call(ActorWorker.update_actor, batch)

    async def compute_advantages(self, batch: Table, kl_coefficient: float) -> tuple[Table, dict[str, float]]:
        """See `AdvantagePort`."""
        group = self.group.over(in_groups(len(batch), self._samples, self.group.num_shards))
        group = group.without(self._unread_by_advantages)
        found = await group.call(ActorWorker.compute_advantages, batch, kl_coefficient)
        return found, reduce_metrics(found)


def unread_by_update(algorithm: AlgorithmSpec) -> frozenset[str]:
    """Return the columns that an update of the policy does not read with this algorithm."""
    is_read = {Keys.REF_LOG_PROB: algorithm.kl.in_loss, Keys.ROLLOUT_LOG_PROBS: algorithm.correction is not None}
    return frozenset(column for column, read in is_read.items() if not read)


def as_ref_log_prob(computed: DataProto) -> DataProto:
    """Return a policy's log-probs under the reference's name."""
    return DataProto.from_dict({Keys.REF_LOG_PROB: computed.ragged(Keys.OLD_LOG_PROBS)})


def reduce_metrics(table: Table) -> dict[str, float]:
    """Return the metrics that a call returned with its table, one number each."""
    per_rank = zip(*table.metrics.values(), strict=True)
    return merge_metrics([dict(zip(table.metrics, values, strict=True)) for values in per_rank])


def rollout_difference(batch: DataProto, ranks: Ranks) -> dict[str, float]:
    """Return metrics of the difference between the rollout engine's token probabilities and the trainer's. Collective.

    verl's `training/rollout_probs_diff_*`: mean, maximum and standard deviation of |exp(rollout) - exp(trainer)|. A
    mean above 0.02 indicates that the engines do not compute the same model.
    """
    mask = batch.ragged(Keys.RESPONSE_MASK).values
    rollout, trainer = batch.ragged(Keys.ROLLOUT_LOG_PROBS).values, batch.ragged(Keys.OLD_LOG_PROBS).values
    difference = (rollout.exp() - trainer.exp()).abs() * mask
    moments = Moments.from_tensor(ranks.sum(Moments.of(difference, mask).to_tensor()))
    return {
        "training/rollout_probs_diff_mean": moments.mean,
        "training/rollout_probs_diff_max": float(ranks.max(difference.max())),
        "training/rollout_probs_diff_std": moments.variance**0.5,
    }
