"""The rollout: vLLM engines that generate the responses. `weights` sends them the policy's weights.

There is one process for each replica. A replica has tensorParallelSize GPUs of a node, or with device CPU a whole node.
A vLLM worker runs on each GPU; all are children of the replica's process, and the replica's other bundles only reserve
their share of the GPU for them. A sample's seed is a hash of run seed, step, prompt and sample number, so responses do
not depend on the replica, the order, or restarts. An engine that shares its GPU with a role that trains sleeps from the
end of generation until it receives the next weights. Each pool with engines (the rollout's own, and those shared with
it) has a separate group.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import EngineArgumentError, RolloutError, RolloutMemoryError
from ppojob_trainer.engines.rollout.failure_log import end_of, explain, memory_shortage
from ppojob_trainer.engines.rollout.options import RolloutOptions, SamplingOptions, environment
from ppojob_trainer.engines.transports import Transports, log_connections
from ppojob_trainer.engines.weights.transfer import Receipt, WeightLink
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from ppojob_trainer.worker_groups.dispatch import Dispatch, Metrics, register
from ppojob_trainer.worker_groups.errors import CallTimeoutError
from ppojob_trainer.worker_groups.partition import Share, spread
from ppojob_trainer.worker_groups.stored_rows import StoredRows, store_rows
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

if TYPE_CHECKING:
    # vLLM takes seconds to import.
    from ppojob_trainer.engines.rollout.engine import Generation

__all__ = [
    "GpuHolder",
    "RolloutGroup",
    "RolloutOfStep",
    "RolloutWorker",
    "rollout_environment",
    "sample_seed",
]

T = TypeVar("T")
_Written: TypeAlias = "tuple[int, Generation]"

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_READ = (Keys.PROMPT_IDS, Keys.UID, Keys.SAMPLE_INDEX)


def rollout_environment(spec: PPOJobSpec, pool: str) -> dict[str, str]:
    """Return the environment variables with which the processes of a pool's replicas must be started."""
    own = environment(RolloutOptions.from_spec(spec, pool))
    return own | spec.pool(pool).network.environment()


def sample_seed(run_seed: int, step: int, uid: str, sample: int) -> int:
    """Return the seed of one response, a number of 31 bits."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{uid}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


@dataclass(frozen=True)
class Collected:
    """Responses of a replica: their positions among its prompts, and references to their rows."""

    positions: tuple[int, ...]
    rows: StoredRows


class RolloutWorker:
    """One replica. Its engine runs in a separate event loop, in a thread; the methods wait for it."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec, pool: str) -> None:
        # vLLM takes seconds to import, and reads its environment at import.
        from ppojob_trainer.engines.rollout.engine import RolloutEngine

        self.context = context
        self.spec = spec
        self._engine = RolloutEngine(RolloutOptions.from_spec(spec, pool))
        self._training = SamplingOptions.training(spec)
        self._validation = SamplingOptions.validation(spec)
        # State of a stream that `begin` started: the prompts, the finished responses, and how many are not collected.
        self._begun: list[list[int]] = []
        self._written: queue.SimpleQueue[_Written | Exception] = queue.SimpleQueue()
        self._num_missing = 0
        self._starting: Future[None]
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()

    @register(dispatch=Dispatch.ALL_TO_ALL)
    def begin_load(self, other_gpus: Sequence[str]) -> None:
        """Start the engine's processes, for this process's GPU and those of the replica's holders; `load` continues."""
        if self.spec.device is Device.CUDA:
            log_connections(self.context.log_file.with_suffix(""))
        if other_gpus:
            # Ray makes only the GPU of its own bundle visible to a process. vLLM has not read the variable yet.
            os.environ[_VISIBLE] = ",".join([os.environ[_VISIBLE], *other_gpus])
        self._starting = asyncio.run_coroutine_threadsafe(self._engine.start(waits_for_gpu=True), self._loop)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def load(self) -> None:
        """Let the engine allocate its memory, and wait until it is ready with the initial weights."""
        self._engine.signal_gpu_free()
        self._wait(self._starting)

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO, reads=_READ)
    def generate(self, prompts: DataProto, step: int, is_validation: bool = False) -> DataProto:
        """Generate a response to each prompt; see `protocol.layout` for the fields."""
        prompt_ids, seeds = prompts.ragged(Keys.PROMPT_IDS).to_lists(), self._seeds(prompts, step)
        sampling = self._validation if is_validation else self._training
        return self._batch(prompt_ids, self._wait(self._engine.generate(prompt_ids, seeds, sampling)))

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC, reads=_READ)
    def begin(self, prompts: DataProto, step: int) -> Metrics:
        """Start to generate the same responses as `generate`; `collect` returns them."""
        prompt_ids = prompts.ragged(Keys.PROMPT_IDS).to_lists()
        self._written = queue.SimpleQueue()
        written = self._write(prompt_ids, self._seeds(prompts, step), self._written)
        self._begun = prompt_ids
        self._num_missing = len(prompt_ids)
        asyncio.run_coroutine_threadsafe(written, self._loop)
        return {}

    async def _write(
        self, prompt_ids: list[list[int]], seeds: list[int], written: queue.SimpleQueue[_Written | Exception]
    ) -> None:
        try:
            # The last response is announced only when the engine is idle.
            last: _Written | None = None
            async for finished in self._engine.stream(prompt_ids, seeds, self._training):
                if last is not None:
                    written.put(last)
                last = finished
            if last is not None:
                written.put(last)
        except Exception as error:  # noqa: BLE001 - it is raised where the caller is: in collect()
            written.put(error)

    @register(dispatch=Dispatch.RANK_ZERO)
    def collect(self, num_rows: int) -> Collected | None:
        """Wait until `num_rows` more responses of the stream are finished, or all that remain; None if none remain."""
        found: list[_Written] = []
        wanted = min(num_rows, self._num_missing)
        while len(found) < wanted or (found and not self._written.empty()):
            try:
                one = self._written.get(timeout=self.context.timeout_s)
            except queue.Empty as error:
                raise CallTimeoutError(f"vLLM finished no response within {self.context.timeout_s:g} s") from error
            if isinstance(one, Exception):
                raise one
            found.append(one)
        if not found:
            return None
        self._num_missing -= len(found)
        positions = tuple(position for position, _ in found)
        batch = self._batch([self._begun[position] for position in positions], [generation for _, generation in found])
        return Collected(positions, store_rows(batch))

    def _seeds(self, prompts: DataProto, step: int) -> list[int]:
        samples = zip(prompts.array(Keys.UID), prompts.array(Keys.SAMPLE_INDEX), strict=True)
        return [sample_seed(self.spec.trainer.seed, step, str(uid), int(sample)) for uid, sample in samples]

    def _batch(self, prompt_ids: list[list[int]], written: Sequence[Generation]) -> DataProto:
        token_ids = [generation.token_ids for generation in written]
        return DataProto.from_dict(rollout_batch(prompt_ids, token_ids, _log_probs(written)))

    @register(dispatch=Dispatch.ALL_TO_ALL)
    def connect_weights(self, places: Sequence[tuple[WeightLink, int]]) -> list[Transports]:
        """Connect each vLLM worker to its sender of the weights, as the receiver with the given number.

        Returns:
            For each worker, the transports by which it passes weights on.
        """
        return self._wait(self._engine.connect_weights(places))

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> Receipt:
        """Receive and load the weights while the actor sends them."""
        return self._wait(self._engine.update_weights(version))

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Release the GPU's memory."""
        self._wait(self._engine.sleep())

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def wake(self, tag: str) -> None:
        """Allocate the memory of `weights` or `kv_cache` again."""
        self._wait(self._engine.wake(tag))

    def _wait(self, work: Coroutine[Any, Any, T] | Future[T]) -> T:
        future = work if isinstance(work, Future) else asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self.context.timeout_s)
        except TimeoutError as error:
            if not future.done():
                future.cancel()
                limit = f"{self.context.timeout_s:g} s"
                raise CallTimeoutError(f"vLLM did not answer within {limit}: see this role's log") from error
            raise
        except EngineArgumentError:
            raise
        except RolloutError as error:
            log = end_of(self.context.log_file)
            shortage = memory_shortage(str(error)) or memory_shortage(log)
            if shortage is not None:
                raise RolloutMemoryError(shortage) from error
            raise type(error)(explain(str(error), log)) from error


def _log_probs(written: Sequence[Generation]) -> list[list[float]] | None:
    """Return the log-probs of all responses, or None if they were not requested."""
    found = [generation.log_probs for generation in written if generation.log_probs is not None]
    return found if len(found) == len(written) else None


def _finished(collected: Collected, share: Share) -> FinishedRows:
    rows = [share.rows[position] for position in collected.positions]
    return FinishedRows(rows, Table.of_stored(collected.rows))


class GpuHolder:
    """Reserves a bundle's share of its GPU for a replica whose process runs in another bundle."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def visible_gpu(self) -> str:
        """Return the GPU's identifier for CUDA_VISIBLE_DEVICES."""
        return os.environ[_VISIBLE]


@dataclass(frozen=True)
class FinishedRows:
    """See `controller.ports.Finished`."""

    rows: Sequence[int]
    batch: Table


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
        return [int(length) for length in self.batch.sums[Keys.RESPONSE_MASK]]


class RolloutGroup:
    """The engines of a pool as the controller calls them."""

    NUM_PARTS = 16
    """Largest number of parts of a stream: with fewer rows per part, a GPU would be used badly."""

    def __init__(
        self,
        group: WorkerGroup[RolloutWorker],
        spec: PPOJobSpec,
        pool: str,
        holders: WorkerGroup[GpuHolder] | None = None,
    ) -> None:
        """`holders`: those of the first replica's other GPUs, then of the second's, ...; None: one GPU per replica."""
        self.group, self.pool, self.holders = group, pool, holders
        self.num_workers = len(group) + (0 if holders is None else len(holders))
        self.sleeps = spec.engines_sleep_in(pool)
        self.has_actor = pool == spec.placement.actor

    @property
    def num_replicas(self) -> int:
        """See `RolloutPort`."""
        return len(self.group)

    @property
    def groups(self) -> list[WorkerGroup[Any]]:
        """All processes: those of the replicas, and those that reserve GPUs for them."""
        return [self.group, *([] if self.holders is None else [self.holders])]

    async def begin_load(self) -> None:
        """Start the engines' processes, which load their libraries and then wait for `load`."""
        gpus = [] if self.holders is None else await self.holders.call(GpuHolder.visible_gpu)
        each = len(gpus) // len(self.group)
        of_replicas = [gpus[replica * each : (replica + 1) * each] for replica in range(len(self.group))]
        await self.group.call(RolloutWorker.begin_load, of_replicas)

    async def load(self) -> None:
        """Let the engines allocate their share of the GPUs' memory, and wait until they are ready."""
        await self.group.call(RolloutWorker.load)

    async def generate(self, prompts: Table, step: int) -> RolloutOfStep:
        """See `RolloutPort`."""
        rollout = await self._generate(prompts, step, is_validation=False)
        if self.sleeps:
            await self.group.call(RolloutWorker.sleep)
        return rollout

    async def stream(self, prompts: Table, step: int) -> AsyncIterator[FinishedRows]:
        """See `RolloutPort`."""
        shares = spread(len(prompts), len(self.group))
        await self.group.over(shares).call(RolloutWorker.begin, prompts, step)
        num_rows = max(1, len(prompts) // self.NUM_PARTS)
        workers = {replica: self.group.only(replica) for replica, share in enumerate(shares) if share.rows}

        async def ask(replica: int) -> tuple[int, Collected | None]:
            return replica, await workers[replica].call(RolloutWorker.collect, num_rows)

        asked = {asyncio.create_task(ask(replica)) for replica in workers}
        try:
            while asked:
                done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                answers = [task.result() for task in done]
                asked |= {asyncio.create_task(ask(replica)) for replica, collected in answers if collected}
                for finished in [_finished(collected, shares[replica]) for replica, collected in answers if collected]:
                    yield finished
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if self.sleeps:
            await self.group.call(RolloutWorker.sleep)

    def joined(self, batch: Table) -> RolloutOfStep:
        """See `RolloutPort`."""
        return RolloutOfStep(batch)

    async def generate_for_validation(self, prompts: Table) -> RolloutOfStep:
        """See `RolloutPort`."""
        return await self._generate(prompts, 0, is_validation=True)

    async def _generate(self, prompts: Table, step: int, *, is_validation: bool) -> RolloutOfStep:
        group = self.group.over(spread(len(prompts), len(self.group)))
        return RolloutOfStep(await group.call(RolloutWorker.generate, prompts, step, is_validation))
