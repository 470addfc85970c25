"""The reference policy: it computes log-probs and never changes. With LoRA it is the actor with its adapters off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.protocol import SEQUENCES, DataProto, Meta
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.partition import balanced
from ppojob_trainer.worker_groups.roles.actor import ActorGroup, ActorWorker
from ppojob_trainer.worker_groups.roles.trained import ModelSource, TrainedWorker, check_fit, check_model, sizes_of
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

if TYPE_CHECKING:
    # Imports transformers, which the driver and the other roles do not need.
    from ppojob_trainer.engines.train.fsdp.policy import ReferenceEngine

__all__ = ["AdaptersOff", "RefGroup", "RefWorker"]


class RefWorker(TrainedWorker):
    """One rank of the reference policy."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        # Divided like the actor, because it reads the same sequences.
        super().__init__(context, spec, spec.actor)
        # Without a separate path it is the actor's model, and uses the actor's remote code.
        own = spec.model.ref if spec.model.ref.path else spec.model.actor
        self.source: ModelSource = ModelSource(own.path or spec.model.actor.path, own.trust_remote_code)
        self._engine: ReferenceEngine | None = None

    @register(dispatch=Dispatch.RANK_ZERO)
    def check(self) -> None:
        """Raise ModelNotFoundError if there is no model at the path, ModelMismatchError if it does not fit the job."""
        check_model(self.source.path, self.source.trust_remote_code, sizes_of("actor", self.spec.actor))
        check_fit("ref", self.source.path, self.source.trust_remote_code, self.spec)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def load(self, stays_gathered: bool) -> None:
        """Load and shard the model, after `join`."""
        from ppojob_trainer.engines.precision import dtype_of
        from ppojob_trainer.engines.train.fsdp.policy import ReferenceEngine

        model = self.spec.model
        is_compiled = model.actor.compile if model.ref.compile is None else model.ref.compile
        self._engine = ReferenceEngine(
            self.parallel,
            self.source.path,
            trust_remote_code=self.source.trust_remote_code,
            compile_layers=is_compiled,
            offload=model.ref.offload,
            stays_gathered=stays_gathered,
            max_tokens_per_gpu=self.spec.actor.max_tokens_per_gpu,
            dtype=dtype_of(self.spec.device),
        )
        self.warm_up(self._engine, is_compiled=is_compiled)

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO, reads=SEQUENCES)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return ref_log_prob."""
        assert self._engine is not None, "load() comes first"
        return self._engine.compute_ref_log_prob(batch)


class RefGroup:
    """The reference as the controller calls it."""

    def __init__(self, group: WorkerGroup[RefWorker], spec: PPOJobSpec) -> None:
        self.group = group.with_peers(spec.actor.num_peers).using({Meta.TEMPERATURE: spec.rollout.temperature})

    async def compute_ref_log_prob(self, batch: Table) -> Table:
        """See `RefPort`."""
        group = self.group.over(balanced(batch.tokens, self.group.num_shards))
        return await group.call(RefWorker.compute_ref_log_prob, batch)


class AdaptersOff:
    """The reference as the controller calls it, computed by the actor's processes without adapters; loads nothing."""

    def __init__(self, actor: ActorGroup) -> None:
        self._actor = actor.group

    async def compute_ref_log_prob(self, batch: Table) -> Table:
        """See `RefPort`."""
        group = self._actor.over(balanced(batch.tokens, self._actor.num_shards))
        return await group.call(ActorWorker.compute_ref_log_prob, batch)
