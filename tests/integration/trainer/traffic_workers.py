"""The roles' own workers with engines that compute nothing: columns of any length, for the controller's traffic.

Everything but the engines is what a job runs: dispatch, tables, streams, advantages over the critic's ranks, receipts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.rollout.options import Capacity, SamplingOptions
from ppojob_trainer.engines.weights.receipts import Receipt
from ppojob_trainer.protocol import DataProto, Keys
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.critic import CriticWorker
from ppojob_trainer.worker_groups.roles.ref import RefWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.worker_process import WorkerContext

READ_BY_ACTOR = (Keys.INPUT_IDS, Keys.OLD_LOG_PROBS, Keys.REF_LOG_PROB, Keys.ADVANTAGES)
READ_BY_CRITIC = (Keys.INPUT_IDS, Keys.VALUES, Keys.RETURNS)


class _Model:
    """Stands for the engine of actor, critic or ref."""

    def __init__(self, role: str, reads: Sequence[str] = ()) -> None:
        self.role = role
        self.reads = reads

    def forward(self, batch: DataProto, *, with_adapters: bool = True) -> DataProto:
        mask = batch.ragged(Keys.RESPONSE_MASK)
        name = Keys.VALUES if self.role == "critic" else Keys.OLD_LOG_PROBS
        return DataProto.from_dict({name: mask.with_values(-mask.place_of / mask.lengths.max() * mask.values)})

    def update(self, batch: DataProto) -> dict[str, float]:
        """Say how many numbers there are in the columns that an update reads."""
        return {f"{self.role}/numbers": float(sum(len(batch.ragged(column).values) for column in self.reads))}


class _Sender:
    """Stands for the way of the weights."""

    def push(self, version: int, *, is_partial: bool = False) -> list[Receipt]:
        return [Receipt(version, 1, 8, (1,))]


class _Engine:
    """Stands for vLLM: responses of `length` tokens, but for the last few of some."""

    def __init__(self) -> None:
        self.length = 1

    def capacity(self) -> Capacity:
        return Capacity(1024, 0)

    def check(self) -> None:
        """It is never lost."""

    def signal_gpu_free(self) -> None:
        """Nobody waits for it."""

    async def start(self, *, waits_for_gpu: bool) -> None:
        """There is nothing to load."""

    async def stream(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: SamplingOptions
    ) -> AsyncIterator[tuple[int, Any]]:
        from ppojob_trainer.engines.rollout.generation import Generation

        for position, seed in enumerate(seeds):
            length = self.length - seed % 7
            yield position, Generation([1] * length, [-1.0] * length, "length")

    async def update_weights(self, version: int) -> list[Receipt]:
        return [Receipt(version, 1, 8, (1,))]


class ColumnActor(ActorWorker):
    """An actor with no model."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        super().__init__(context, spec)
        self._engine = cast("Any", _Model("actor", READ_BY_ACTOR))
        self._sender = cast("Any", _Sender())


class ColumnCritic(CriticWorker):
    """A critic with no model."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        super().__init__(context, spec)
        self._engine = cast("Any", _Model("critic", READ_BY_CRITIC))


class ColumnRef(RefWorker):
    """A reference with no model."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        super().__init__(context, spec)
        self._engine = cast("Any", _Model("ref"))


class ColumnRollout(RolloutWorker):
    """A rollout without vLLM."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec, pool: str) -> None:
        super().__init__(context, spec, pool)
        self._engine = cast("Any", _Engine())

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def answer_with(self, length: int) -> None:
        """Generate responses of so many tokens from now on."""
        self._engine.length = length
