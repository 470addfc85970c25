"""The rollout: vLLM engines that write the responses, and the way of the policy's weights to them.

One process for each replica; a replica has a GPU, or with device cpu a node. A sample's seed is a hash of run seed,
step, prompt and sample number, so responses depend neither on which replica writes them, nor on the order, nor on
restarts. Where actor and rollout share GPUs, the engine sleeps from the end of generation until the next weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.vllm.options import RolloutOptions, SamplingOptions, environment
from ppojob_trainer.engines.weight_transfer import Receipt, WeightLink, link_plan, verify
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.errors import CallTimeoutError
from ppojob_trainer.worker_groups.partition import spread
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import Seat

__all__ = [
    "RolloutGroup",
    "RolloutOfStep",
    "RolloutWorker",
    "WeightsGroup",
    "rollout_environment",
    "sample_seed",
    "shares_gpus",
]

T = TypeVar("T")

_PAD_TOKEN = 0
"""Fills the gaps; packing drops them before a model sees anything."""


def shares_gpus(spec: PPOJobSpec) -> bool:
    """Whether a role that trains sits on the rollout's GPUs."""
    return spec.placement.rollout in (spec.placement.actor, spec.placement.critic)


def rollout_environment(spec: PPOJobSpec) -> dict[str, str]:
    """Return the variables that the replicas' processes must be started with."""
    return environment(RolloutOptions.from_spec(spec, is_shared=shares_gpus(spec)))


def sample_seed(run_seed: int, step: int, uid: str, sample: int) -> int:
    """Return the seed of one response, 31 bits."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{uid}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


class RolloutWorker:
    """One replica. Its engine lives in an event loop of its own, in a thread; the methods wait for it."""

    def __init__(self, seat: Seat, spec: PPOJobSpec) -> None:
        # vLLM takes seconds to import and must find its environment set.
        from ppojob_trainer.engines.vllm.engine import RolloutEngine

        self.seat = seat
        self.spec = spec
        self._engine = RolloutEngine(RolloutOptions.from_spec(spec, is_shared=shares_gpus(spec)))
        self._training = SamplingOptions.training(spec)
        self._validation = SamplingOptions.validation(spec)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def load(self) -> None:
        """Start the engine with the initial weights."""
        self._wait(self._engine.start())

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts: DataProto, step: int, is_validation: bool = False) -> DataProto:
        """Write a response to each prompt; see `protocol.layout` for the fields."""
        seed = self.spec.trainer.seed
        samples = zip(prompts.array(Keys.UID), prompts.array(Keys.SAMPLE_INDEX), strict=True)
        seeds = [sample_seed(seed, step, str(uid), int(sample)) for uid, sample in samples]
        prompt_ids = prompts.array(Keys.PROMPT_IDS).tolist()
        sampling = self._validation if is_validation else self._training
        written = self._wait(self._engine.generate(prompt_ids, seeds, sampling))
        data = self.spec.data
        return DataProto.from_dict(
            rollout_batch(
                prompt_ids,
                [generation.token_ids for generation in written],
                _PAD_TOKEN,
                # The same widths in all replicas, or their results could not be put together.
                data.max_prompt_length,
                data.max_response_length,
                [generation.log_probs for generation in written],
            )
        )

    @register(dispatch=Dispatch.ALL_TO_ALL)
    def connect_weights(self, place: tuple[WeightLink, int]) -> None:
        """Connect to the sender of the weights, as receiver number `place[1]`."""
        self._wait(self._engine.connect_weights(*place))

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> Receipt:
        """Receive and load weights, while the actor sends them."""
        return self._wait(self._engine.update_weights(version))

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Give the GPU's memory back."""
        self._wait(self._engine.sleep())

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def wake(self, tag: str) -> None:
        """Take the memory of `weights` or `kv_cache` again."""
        self._wait(self._engine.wake(tag))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self.seat.timeout_s)
        except TimeoutError as error:
            if not future.done():
                future.cancel()
                limit = f"{self.seat.timeout_s:g} s"
                raise CallTimeoutError(f"vLLM did not answer within {limit}: look into this role's log") from error
            raise


@dataclass(frozen=True)
class RolloutOfStep:
    """See `controller.ports.Rollout`."""

    batch: Table

    @property
    def prompt_lengths(self) -> Sequence[int]:
        """Tokens of each prompt."""
        return [total - response for total, response in zip(self.batch.tokens, self.response_lengths, strict=True)]

    @property
    def response_lengths(self) -> Sequence[int]:
        """Tokens of each response."""
        return self.batch.lengths[Keys.RESPONSE_MASK]


class RolloutGroup:
    """The rollout as the controller calls it."""

    def __init__(self, group: WorkerGroup[RolloutWorker], spec: PPOJobSpec) -> None:
        self.group = group
        self.sleeps = shares_gpus(spec) and spec.device is Device.CUDA

    async def generate(self, prompts: Table, step: int) -> RolloutOfStep:
        """See `RolloutPort`."""
        rollout = await self._generate(prompts, step, is_validation=False)
        if self.sleeps:
            await self.group.call(RolloutWorker.sleep)
        return rollout

    async def generate_for_validation(self, prompts: Table) -> RolloutOfStep:
        """See `RolloutPort`."""
        return await self._generate(prompts, 0, is_validation=True)

    async def _generate(self, prompts: Table, step: int, *, is_validation: bool) -> RolloutOfStep:
        group = self.group.over(spread(len(prompts), len(self.group)))
        return RolloutOfStep(await group.call(RolloutWorker.generate, prompts, step, is_validation))


class WeightsGroup:
    """See `controller.ports.WeightsPort`: actor ranks send, replicas receive, the receipts are compared."""

    def __init__(self, actor: WorkerGroup[ActorWorker], rollout: RolloutGroup, spec: PPOJobSpec) -> None:
        self._actor = actor
        self._rollout = rollout.group
        self._sleeps = rollout.sleeps
        self._plans = link_plan(
            spec.device,
            num_ranks=len(actor),
            num_replicas=len(rollout.group),
            is_shared=spec.placement.rollout == spec.placement.actor,
        )

    async def connect(self) -> None:
        """Make the connections, once."""
        plan_of = {plan.sender_rank: plan for plan in self._plans}
        links = await self._actor.call(
            ActorWorker.open_weights, [plan_of.get(rank) for rank in range(len(self._actor))]
        )
        places: dict[int, tuple[WeightLink, int]] = {}
        for plan in self._plans:
            link = links[plan.sender_rank]
            assert link is not None, "a rank with a plan has a link"
            places |= {replica: (link, number + 1) for number, replica in enumerate(plan.replicas)}
        connected = self._rollout.call(
            RolloutWorker.connect_weights, [places[replica] for replica in range(len(self._rollout))]
        )
        await asyncio.gather(self._actor.call(ActorWorker.connect_weights), connected)

    async def push(self, version: int) -> None:
        """See `WeightsPort`.

        Raises:
            WeightSyncError: a replica has other weights than the actor.
        """
        if self._sleeps:
            await self._rollout.call(RolloutWorker.wake, "weights")
        sent, received = await asyncio.gather(
            self._actor.call(ActorWorker.push_weights, version),
            self._rollout.call(RolloutWorker.update_weights, version),
        )
        for plan in self._plans:
            receipt = sent[plan.sender_rank]
            assert receipt is not None, "a rank with a plan has sent"
            verify(receipt, [received[replica] for replica in plan.replicas])
        if self._sleeps:
            await self._rollout.call(RolloutWorker.wake, "kv_cache")
