"""The reference policy: it computes log-probs and never changes. With LoRA it is the actor with its adapters off."""

from __future__ import annotations

from functools import cached_property

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.precision import dtype_of
from ppojob_trainer.engines.train.engine import EngineSetup
from ppojob_trainer.protocol import SEQUENCES, DataProto, Keys, Meta
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.partition import balanced
from ppojob_trainer.worker_groups.roles.actor import ActorGroup, ActorWorker, as_ref_log_prob
from ppojob_trainer.worker_groups.roles.trained import EngineWorker, ModelSource, check_fit
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

__all__ = ["AdaptersOff", "RefGroup", "RefWorker", "unread_by_reference"]


class RefWorker(EngineWorker):
    """One rank of the reference policy."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        # Divided like the actor, because it reads the same sequences.
        super().__init__(context, spec, spec.actor)
        # Without a separate path it is the actor's model, and uses the actor's remote code.
        own = spec.model.ref if spec.model.ref.path else spec.model.actor
        self.source = ModelSource(own.path or spec.model.actor.path, own.trust_remote_code)

    @cached_property
    def setup(self) -> EngineSetup:
        """See `EngineWorker`."""
        model, source = self.spec.model, self.source
        is_compiled = model.actor.compile if model.ref.compile is None else model.ref.compile
        own = {"path": source.path, "trust_remote_code": source.trust_remote_code, "compile": is_compiled}
        return EngineSetup(
            model.ref.model_copy(update=own),
            self.spec.actor,
            objective=None,
            dtype=dtype_of(self.spec.device),
            per_host=self.context.local_world_size,
            replays_experts=self.spec.rollout.routing_replay and not unread_by_reference(self.spec),
        )

    @register(dispatch=Dispatch.RANK_ZERO)
    def check(self) -> None:
        """Check the model without loading it; raises what the actor's check raises for a model."""
        self.engine.check()
        check_fit("ref", self.source, self.spec)

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO, reads=(*SEQUENCES, Keys.ROUTED_EXPERTS))
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Return ref_log_prob."""
        self.check_recording(batch)
        return as_ref_log_prob(self.engine.forward(batch))


class RefGroup:
    """The reference as the controller calls it."""

    def __init__(self, group: WorkerGroup[RefWorker], spec: PPOJobSpec) -> None:
        self.group = group.with_peers(spec.actor.num_peers, spec.actor.pipeline_parallel_size).using(
            {Meta.TEMPERATURE: spec.rollout.temperature}
        )
        self._unread = unread_by_reference(spec)

    async def compute_ref_log_prob(self, batch: Table) -> Table:
        """See `RefPort`."""
        group = self.group.over(balanced(batch.tokens, self.group.num_shards)).without(self._unread)
        return await group.call(RefWorker.compute_ref_log_prob, batch)


def unread_by_reference(spec: PPOJobSpec) -> frozenset[str]:
    """Return the columns that the reference does not read: the recorded experts, if it has others than the actor."""
    return frozenset() if spec.model.reference_has_actors_weights else frozenset({Keys.ROUTED_EXPERTS})


class AdaptersOff:
    """The reference as the controller calls it, computed by the actor's processes without adapters; loads nothing."""

    def __init__(self, actor: ActorGroup) -> None:
        self._actor = actor.group

    async def compute_ref_log_prob(self, batch: Table) -> Table:
        """See `RefPort`."""
        group = self._actor.over(balanced(batch.tokens, self._actor.num_shards))
        return await group.call(ActorWorker.compute_ref_log_prob, batch)
