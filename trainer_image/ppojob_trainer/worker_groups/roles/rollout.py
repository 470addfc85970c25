"""The rollout's processes: vLLM engines that generate the responses. `rollout_group` calls them.

There is one process for each replica. A replica has tensorParallelSize times pipelineParallelSize GPUs, of one node or
of several whole ones; with device CPU, so many nodes. A vLLM worker runs on each GPU; those of a node are children of
its first process, and the other bundles only reserve their share of the GPU for them (`gpu_holder`). A sample's seed is
a hash of run seed, step, prompt and sample number, so responses do not depend on the replica, the order, or restarts.
An engine that shares its GPU with a role that trains sleeps from the end of generation until it receives the next
weights. Each pool with engines (the rollout's own, and those shared with it) has a separate group.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import EngineLostError, RolloutError
from ppojob_trainer.engines.rollout.engine_nodes import EngineNode
from ppojob_trainer.engines.rollout.failure_log import explained
from ppojob_trainer.engines.rollout.options import (
    NO_DRAFTS,
    Capacity,
    Drafts,
    RolloutOptions,
    SamplingOptions,
    environment,
)
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.plans import WeightLink
from ppojob_trainer.engines.weights.receipts import Receipt
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from ppojob_trainer.worker_groups.dispatch import Dispatch, Metrics, register
from ppojob_trainer.worker_groups.errors import CallTimeoutError, NotRenewableError
from ppojob_trainer.worker_groups.roles.gpu_holder import NodePart, prepare_part
from ppojob_trainer.worker_groups.stored_rows import StoredRows, store_rows
from ppojob_trainer.worker_groups.worker_process import WorkerContext

if TYPE_CHECKING:
    # vLLM takes seconds to import.
    from ppojob_trainer.engines.rollout.generation import Generation

__all__ = [
    "Collected",
    "RolloutWorker",
    "rollout_environment",
    "sample_seed",
]

T = TypeVar("T")
_Written: TypeAlias = "tuple[int, Generation]"

PATIENCE_S, SHORT_PATIENCE_S = 2.0, 0.2
"""Seconds after which a replica answers though too little is finished: the controller may have more work for it. With
weight updates in flight, the replica gets weights between two such answers; with dynamic sampling, it gets further
prompts, or ends what the full batch does not need."""
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
    """Finished responses of a replica: the numbers under which it got their prompts, and references to their rows.

    drafts: how they were generated.
    """

    numbers: tuple[int, ...]
    rows: StoredRows
    drafts: Drafts = NO_DRAFTS


@dataclass
class _Drawn:
    """The responses of one generation in a replica.

    prompts: by number, of the responses that are not collected. finished: comes from the engine's thread. ready: taken
    from there, and too few to be collected. writing: belongs to the engine's thread.
    """

    number: int
    prompts: dict[int, list[int]] = field(default_factory=dict)
    finished: queue.SimpleQueue[_Written | Exception] = field(default_factory=queue.SimpleQueue)
    ready: list[_Written] = field(default_factory=list)
    writing: list[asyncio.Task[None]] = field(default_factory=list)


class RolloutWorker:
    """One replica. Its engine runs in a separate event loop, in a thread; the methods wait for it."""

    _patience_s: float | None = None
    _starting: Future[None] | None = None

    def __init__(self, context: WorkerContext, spec: PPOJobSpec, pool: str) -> None:
        # vLLM takes seconds to import, and reads its environment at import.
        from ppojob_trainer.engines.rollout.engine import RolloutEngine

        self.context = context
        self.spec = spec
        if spec.schedule.updates_in_flight or spec.algorithm.dynamic_sampling is not None:
            self._patience_s = SHORT_PATIENCE_S
        self._engine = RolloutEngine(RolloutOptions.from_spec(spec, pool))
        self._training = SamplingOptions.training(spec)
        self._validation = SamplingOptions.validation(spec)
        self._drawn = _Drawn(0)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def meet(self, num_nodes: int) -> EngineNode:
        """Prepare an engine of several nodes, of which this is the first one, and return it. `begin_load` follows.

        Once: an engine of an earlier attempt continues, as do its other nodes.
        """
        return self._wait(self._engine.meet(self.context.address, num_nodes))

    @register(dispatch=Dispatch.ALL_TO_ALL)
    def begin_load(self, part: NodePart) -> None:
        """Start the engine's processes, for the replica's GPUs on this node; `load` continues.

        Once: an engine of an earlier attempt continues.
        """
        if self._starting is not None:
            return
        prepare_part(part, self.spec.device, self.context.log_file)
        self._starting = asyncio.run_coroutine_threadsafe(self._engine.start(waits_for_gpu=True), self._loop)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def load(self) -> Capacity:
        """Let the engine allocate its memory, and wait until it is ready with the initial weights."""
        assert self._starting is not None, "begin_load() comes first"
        self._engine.signal_gpu_free()
        self._wait(self._starting)
        return self._engine.capacity()

    def renew(self) -> None:
        """See `Renewable`: drop the responses of the last attempt. The next push brings other weights."""
        if self._starting is None or not self._starting.done():
            raise NotRenewableError("vLLM had not started yet")
        self.check()
        self.abort()

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC, reads=_READ)
    def begin(
        self, prompts: DataProto, numbers: Sequence[int], step: int, generation: int, is_validation: bool
    ) -> Metrics:
        """Begin to generate a response to each prompt; `collect` returns them under these numbers.

        Args:
            generation: its number; a new number drops the rest of the generation before.
        """
        if generation != self._drawn.number:
            self.abort()
            self._drawn = _Drawn(generation)
        prompt_ids = prompts.ragged(Keys.PROMPT_IDS).to_lists()
        self._drawn.prompts |= dict(zip(numbers, prompt_ids, strict=True))
        sampling = self._validation if is_validation else self._training
        work = self._write(self._drawn, numbers, prompt_ids, self._seeds(prompts, step), sampling)
        asyncio.run_coroutine_threadsafe(work, self._loop)
        return {}

    async def _write(
        self,
        drawn: _Drawn,
        numbers: Sequence[int],
        prompt_ids: list[list[int]],
        seeds: list[int],
        sampling: SamplingOptions,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None, "the engine's loop runs it as a task"
        drawn.writing.append(task)
        try:
            async for index, generation in self._engine.stream(prompt_ids, seeds, sampling):
                drawn.finished.put((numbers[index], generation))
        except Exception as error:  # noqa: BLE001 - it is raised where the caller is: in collect()
            drawn.finished.put(error)

    @register(dispatch=Dispatch.RANK_ZERO)
    def collect(self, num_rows: int) -> Collected | None:
        """Return what is finished as soon as it is `num_rows` responses; None if it is fewer after a while.

        Raises:
            EngineLostError: vLLM's processes exited; everything that was finished before has been returned.
            RolloutError: the engine failed otherwise.
        """
        drawn, found = self._drawn, self._drawn.ready
        deadline = time.monotonic() + (self._patience_s or PATIENCE_S)
        while len(found) < num_rows or not drawn.finished.empty():
            try:
                one = drawn.finished.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                if self._engine.loss is None:
                    # They stay, because a part costs each of its readers a fetch.
                    return None
                one = self._engine.loss
            if isinstance(one, Exception):
                if not found:
                    raise self._explained(one)
                # It is raised by the next call.
                drawn.finished.put(one)
                break
            found.append(one)
        drawn.ready = []
        prompts = [drawn.prompts.pop(number) for number, _ in found]
        written = [generation for _, generation in found]
        rows = store_rows(self._batch(prompts, written))
        return Collected(tuple(number for number, _ in found), rows, self._drafts(written))

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def abort(self) -> None:
        """Let the engine end what it has not finished; what was not collected is dropped."""
        drawn, self._drawn = self._drawn, _Drawn(0)
        self._wait(_cancel(drawn.writing))

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def check(self) -> None:
        """Raise an EngineLostError if vLLM's processes exited."""
        try:
            self._engine.check()
        except EngineLostError as error:
            raise self._explained(error) from error

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def stop(self) -> None:
        """End the remaining processes of a lost engine, so that they hold no memory. Collected responses stay."""
        self._wait(self._engine.shutdown())

    def _seeds(self, prompts: DataProto, step: int) -> list[int]:
        samples = zip(prompts.array(Keys.UID), prompts.array(Keys.SAMPLE_INDEX), strict=True)
        return [sample_seed(self.spec.trainer.seed, step, str(uid), int(sample)) for uid, sample in samples]

    def _batch(self, prompt_ids: list[list[int]], written: Sequence[Generation]) -> DataProto:
        token_ids = [generation.token_ids for generation in written]
        versions = [generation.versions for generation in written if generation.versions is not None]
        experts = [generation.experts for generation in written if generation.experts is not None]
        columns = rollout_batch(prompt_ids, token_ids, _log_probs(written), versions or None, experts or None)
        if self.spec.algorithm.bypasses_old_log_probs and Keys.ROLLOUT_LOG_PROBS in columns:
            columns[Keys.OLD_LOG_PROBS] = columns.pop(Keys.ROLLOUT_LOG_PROBS)
        return DataProto.from_dict(columns)

    def _drafts(self, written: Sequence[Generation]) -> Drafts:
        return Drafts.total(generation.drafts for generation in written)

    @register(dispatch=Dispatch.ALL_TO_ALL)
    def connect_weights(self, places: Sequence[tuple[WeightLink, int]]) -> list[Transports]:
        """Connect each vLLM worker to its sender of the weights, as the receiver with the given number.

        Returns:
            For each worker, the transports by which it passes weights on.
        """
        return self._wait(self._engine.connect_weights(places))

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> list[Receipt]:
        """Receive and load the weights while the actor sends them; return the receipt of each vLLM worker."""
        return self._wait(self._engine.update_weights(version))

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def resume(self) -> None:
        """Continue with weights that were loaded in flight; their receipt has been compared."""
        self._wait(self._engine.resume())

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
        except RolloutError as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> Exception:
        return explained(error, self.context.log_file)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _log_probs(written: Sequence[Generation]) -> list[list[float]] | None:
    """Return the log-probs of all responses, or None if they were not requested."""
    found = [generation.log_probs for generation in written if generation.log_probs is not None]
    return found if len(found) == len(written) else None
