"""One rollout replica: vLLM's asynchronous engine, its weights and its sleep mode.

Called by the rollout role, in an event loop. A child process of vLLM computes; this object sends requests and weights
to it. It refuses to generate without weights, and to receive weights while it generates, unless its options let it
update them in flight: then vLLM pauses between two of its steps, and the unfinished responses continue with the new
weights (`weight_changes`). An engine of several nodes has `follower`s on the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Final, TypeVar

from vllm import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import (
    EngineLostError,
    GenerationTimeoutError,
    RolloutError,
    WeightReceiptError,
)
from ppojob_trainer.engines.rollout.engine_nodes import EngineNode, FirstNode
from ppojob_trainer.engines.rollout.generation import Generation
from ppojob_trainer.engines.rollout.gpu_gate import GpuGate
from ppojob_trainer.engines.rollout.options import (
    SCHEDULER,
    WORKER_ADDRESS,
    WORKER_FAILURE,
    Capacity,
    RolloutOptions,
    SamplingOptions,
)
from ppojob_trainer.engines.rollout.quantized_read_back import check_gpu
from ppojob_trainer.engines.rollout.sampling import drafts_of, experts_of, log_probs_of, sampling_parameters
from ppojob_trainer.engines.rollout.stop_strings import is_known
from ppojob_trainer.engines.rollout.vllm_arguments import checked_arguments, prepare_process
from ppojob_trainer.engines.rollout.weight_changes import TOKENS_AT_UPDATES, clear_cache, versions_of_tokens
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.plans import WeightLink
from ppojob_trainer.engines.weights.receipts import UNREAD, Receipt, read_by_none

logger = logging.getLogger(__name__)

# Sleep level 2 releases weights and cache: the next weights come from the trainer in any case.
SLEEP_LEVEL_DISCARD: Final = 2
_PARTS: Final = frozenset({"weights", "kv_cache"})
"""What vLLM wakes up by itself."""
_SHARE_OF_A_PUSH: Final = 0.5
"""Of the time limit of a phase, for engines whose workers reduce over each other while they round weights: one of them
may wait for another one that failed. The rest is for a push to the other engines."""
_POLL_S: Final = 0.5
_NO_UPDATE: Final = "default"
"""vLLM's label of the weights that it loaded at its start."""

T = TypeVar("T")


class RolloutEngine:
    """See the module's docstring. Start the process with `options.environment`."""

    def __init__(self, options: RolloutOptions) -> None:
        self.options = options
        self.weights_version = 0
        """Version of the loaded weights; 0: those of the model's folder."""
        self._llm: AsyncLLM | None = None
        self._request_ids = itertools.count()
        self._num_running = 0
        self._asleep: frozenset[str] = frozenset()
        self._has_weights = True
        self._finds_stops = False
        """Whether the scheduler looks for stop strings."""
        # vLLM labels a response with the number of the update that it ended after: the position in this list.
        self._versions = [self.weights_version]
        self._gate = GpuGate()
        self._nodes = FirstNode()

    def signal_gpu_free(self) -> None:
        """Let a waiting `start` on CUDA continue: the other roles' models are loaded and idle."""
        self._gate.open()

    async def meet(self, address: str, num_nodes: int) -> EngineNode:
        """Prepare to `start` an engine of several nodes, of which this is the first one; return it.

        Args:
            address: under which the others reach this one.
        """
        return await self._nodes.meet(address, num_nodes, self.options.timeout_seconds)

    def capacity(self) -> Capacity:
        """Return what the engine computes at the same time; it must have started."""
        config = self._running().vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        return Capacity(scheduler.max_num_seqs, (cache.num_gpu_blocks or 0) * (cache.block_size or 0))

    async def start(self, *, waits_for_gpu: bool = False) -> None:
        """Load the model and make the engine ready; 20 to 60 s.

        Args:
            waits_for_gpu: on CUDA, import libraries and wait for `signal_gpu_free` before the GPU's memory is measured.

        Raises:
            EngineArgumentError: vLLM has no argument of a name in `rollout.engineArgs`, or refuses its value; or the
                GPU does not have the format of `rollout.quantization`.
            RolloutError: vLLM could not start; the cause is chained.
        """
        node = self._nodes.node
        prepare_process(None if node is None else node.address)
        arguments = checked_arguments(self.options, node)
        if self.options.quantization is not None:
            check_gpu(self.options.quantization)
        if waits_for_gpu and self.options.device is Device.CUDA:
            self._gate.hold(arguments)
        try:
            # It blocks for long; the event loop must serve the owner's other calls meanwhile.
            starting = asyncio.create_task(asyncio.to_thread(AsyncLLM.from_engine_args, arguments))
            self._llm = await self._nodes.unless_lost(starting)
        except (RuntimeError, ValueError, OSError) as error:
            seen = RolloutError(f"vLLM could not start with the model {self.options.path}: {error}")
            raise await self._nodes.cause_of(seen) from error
        self._finds_stops = arguments.scheduler_cls == SCHEDULER and is_known(self._llm.renderer.tokenizer)
        await self._workers("ppojob_end_with", os.getpid())
        if self.options.pipeline_parallel_size > 1 and self.options.device is Device.CPU:
            await self._workers("ppojob_allocate_stage_inputs")
        if self.options.speculative is not None:
            await self._workers("ppojob_verify_by_seed")
        if self.options.routing_replay:
            await self._workers("ppojob_record_experts")

    async def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: SamplingOptions
    ) -> list[Generation]:
        """Return a response to each prompt, in the order of the prompts. See `stream`."""
        found: list[Generation | None] = [None] * len(prompts)
        async for index, generation in self.stream(prompts, seeds, sampling):
            found[index] = generation
        return [generation for generation in found if generation is not None]

    async def stream(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: SamplingOptions
    ) -> AsyncIterator[tuple[int, Generation]]:
        """Yield (index of the prompt, its response) as each response finishes.

        Several streams may run at the same time. A response that was yielded keeps no weights from being loaded.

        Args:
            prompts: token ids, each with at least one token and room for `max_tokens` more.
            seeds: one for each; a prompt with its seed gives the same response in any batch.

        Raises:
            RolloutError: weights are missing, or a request was refused.
            EngineLostError: the engine exited.
            GenerationTimeoutError: the last response took longer than `timeout_seconds` of the options.
        """
        self._check_ready()
        if len(prompts) != len(seeds):
            raise RolloutError(f"{len(prompts)} prompts but {len(seeds)} seeds: each prompt needs its own")
        tasks = [
            asyncio.create_task(self._one(index, prompt, seed, sampling))
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        self._num_running += len(tasks)
        for task in tasks:
            # Added before those of `as_completed`, so the response is not counted any more when it is yielded.
            task.add_done_callback(self._count_down)
        try:
            for done in asyncio.as_completed(tasks, timeout=self.options.timeout_seconds):
                yield await done
        except TimeoutError as error:
            left = sum(not task.done() for task in tasks)
            raise GenerationTimeoutError(
                f"{left} of {len(prompts)} responses were not finished after {self.options.timeout_seconds:g} s"
            ) from error
        finally:
            await _cancel(tasks)

    def _count_down(self, _: asyncio.Task[Any]) -> None:
        self._num_running -= 1

    async def connect_weights(self, places: Sequence[tuple[WeightLink, int]]) -> list[Transports]:
        """Connect to the trainer's senders, whose `prepare` runs at the same time.

        Args:
            places: for each vLLM worker its link, and its number among the receivers of that link, from 1.

        Returns:
            For each worker, the transports by which it passes weights on to others.
        """
        return await self._workers("ppojob_connect_weights", [[link.to_wire(), number] for link, number in places])

    async def update_weights(self, version: int) -> list[Receipt]:
        """Load the weights that the trainer's `push(version)` sends at the same time; return each worker's receipt.

        After a failure, the weights may be of two versions: the engine refuses to generate until the next push, which
        must be complete, as after a sleep. If weights may change in flight, vLLM stays paused until `resume`, and
        requests wait.

        Raises:
            RolloutError: the engine is asleep, it is generating and may not change weights in flight, or the transfer
                failed.
            EngineLostError: the engine exited, or a worker neither got the weights nor failed in `timeout_seconds` of
                the options; in half of them, if the workers round weights together.
        """
        if self.options.updates_in_flight:
            await self._pause()
        else:
            self._refuse_while_running("weights cannot change under them")
        keeps_weights, self._has_weights = self._has_weights, False
        rounds_together = self.options.quantization is not None and self.options.tensor_parallel_size > 1
        limit_s = self.options.timeout_seconds * (_SHARE_OF_A_PUSH if rounds_together else 1.0)
        receipts = await self._workers("ppojob_receive_weights", version, keeps_weights, limit_s=limit_s)
        # A worker reads nothing of other workers' experts. What no worker reads may be left out on purpose.
        if left_out := read_by_none([receipt.pop(UNREAD) for receipt in receipts]):
            logger.warning("vLLM leaves out %d weights of %s: %s", len(left_out), self.options.path, left_out[:4])
        # The prefix cache holds results of the old weights.
        await self.reset_prefix_cache()
        if self.options.updates_in_flight:
            # vLLM's record of each unfinished response has an entry for each update, also for one that is repeated.
            self._versions.append(version)
        self.weights_version, self._has_weights = version, True
        return [Receipt(**{**receipt, "checksums": tuple(receipt["checksums"])}) for receipt in receipts]

    async def _pause(self) -> None:
        """Wait until vLLM's current step is done, and begin no other one. All responses stay as they are."""
        await self._answer("paused", self._running().pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        """Continue with the weights that `update_weights` loaded in flight, after the receipts have been compared.

        Raises:
            EngineLostError: the engine exited.
        """
        await self._answer("continued", self._running().update_weight_version(str(len(self._versions) - 1)))
        await self._answer("continued", self._running().resume_generation())

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache; raises what `clear_cache` raises."""
        await clear_cache(lambda: self._answer("cleared its cache", self._running().reset_prefix_cache()))

    async def sleep(self) -> None:
        """Release weights and cache if the GPU is shared (see the options). New weights must then be sent."""
        if not self.options.sleeps or self.options.device is Device.CPU or "weights" in self._asleep:
            return
        self._refuse_while_running("the engine cannot sleep now")
        await self._answer("slept", self._running().sleep(level=SLEEP_LEVEL_DISCARD))
        self._asleep, self._has_weights = _PARTS, False

    async def wake(self, part: str | None = None) -> None:
        """Allocate memory again: `weights` before a push, then `kv_cache`; None allocates both."""
        if not self._asleep:
            return
        await self._answer("woke up", self._running().wake_up(tags=None if part is None else [part]))
        self._asleep -= _PARTS if part is None else {part}

    @property
    def loss(self) -> EngineLostError | None:
        """Why this engine was given up while vLLM's processes run, so that its streams end with no error."""
        return self._nodes.lost.error

    def check(self) -> None:
        """Find out whether the engine still runs.

        Raises:
            EngineLostError: one of its processes exited, or did not answer in time.
        """
        self._nodes.lost.check()
        if self._running().errored:
            raise EngineLostError("vLLM's engine exited while it was idle")

    async def shutdown(self) -> None:
        """Terminate the engine and its child process. It cannot be used afterwards."""
        self._nodes.close()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            # In this thread: vLLM's task that reads answers must be cancelled before it sees the child exit.
            llm.shutdown()
        self._gate.remove()

    async def _one(self, index: int, prompt: list[int], seed: int, sampling: SamplingOptions) -> tuple[int, Generation]:
        request_id = f"ppojob-{next(self._request_ids)}"
        final = None
        try:
            async for output in self._running().generate(
                {"prompt_token_ids": prompt},
                sampling_parameters(sampling, seed, finds_stops=self._finds_stops),
                request_id,
            ):
                final = output
        except EngineDeadError as error:
            raise await self._nodes.cause_of(EngineLostError(f"vLLM's engine exited: {error}")) from error
        except (EngineGenerateError, ValueError) as error:
            raise RolloutError(f"vLLM failed at prompt {index} of {len(prompt)} tokens: {error}") from error
        if final is None:
            raise RolloutError(f"vLLM ended prompt {index} without an answer")
        completion = final.outputs[0]
        return index, Generation(
            list(completion.token_ids),
            log_probs_of(completion.logprobs) if sampling.log_probs else None,
            str(completion.finish_reason),
            drafts_of(len(completion.token_ids), completion.spec_decode_metrics),
            self._versions_of(final) if self.options.updates_in_flight else None,
            experts_of(completion, len(prompt) + len(completion.token_ids)) if sampling.experts else None,
        )

    def _versions_of(self, final: RequestOutput) -> list[int]:
        """Return the version of the weights that sampled each token of a complete response."""
        completion, record = final.outputs[0], final.kv_transfer_params or {}
        label = completion.weight_versions[-1].version if completion.weight_versions else _NO_UPDATE
        number = 0 if label == _NO_UPDATE else int(label)
        counts = record.get(TOKENS_AT_UPDATES, [])
        return versions_of_tokens(len(completion.token_ids), counts, self._versions[: number + 1])

    async def _workers(self, method: str, *arguments: Any, limit_s: float | None = None) -> list[Any]:
        limit_s = self.options.timeout_seconds if limit_s is None else limit_s
        try:
            call = self._running().collective_rpc(method, args=arguments)
            results: list[Any] = await self._answer(f"finished {method}", call, limit_s)
        except EngineLostError:
            raise
        except TimeoutError as error:
            # vLLM waits for all of its workers, so it would answer no later call.
            lost = EngineLostError(
                f"vLLM's workers ({self.options.num_workers}) did not all finish {method} within "
                f"{limit_s:g} s, so this engine is given up: this role's log has the error if one of them failed; if "
                "the transfer is only slow, raise trainer.phaseTimeoutSeconds"
            )
            self._nodes.lost.record(lost)
            raise lost from error
        except Exception as error:
            # vLLM passes a worker's failure on as a plain Exception with the worker's message.
            raise RolloutError(f"vLLM's workers failed in {method}: {error}") from error
        for number, result in enumerate(results):
            if isinstance(result, dict) and WORKER_FAILURE in result:
                failure = WeightReceiptError(f"vLLM's worker {number} failed in {method}: {result[WORKER_FAILURE]}")
                failure.address = result[WORKER_ADDRESS]
                raise failure
        return results

    async def _answer(self, what: str, call: Awaitable[T], limit_s: float = math.inf) -> T:
        """Return vLLM's answer to a call. vLLM alone would wait for ever if its engine exits meanwhile (0.32).

        Args:
            what: what the engine has done when it answers, for the message.
            limit_s: the longest wait, in seconds.

        Raises:
            EngineLostError: the engine exited.
            TimeoutError: there was no answer in time.
        """
        llm, answer, end = self._running(), asyncio.ensure_future(call), time.monotonic() + limit_s
        try:
            while not (await asyncio.wait([answer], timeout=min(_POLL_S, max(0.0, end - time.monotonic()))))[0]:
                if llm.errored:
                    raise await self._nodes.cause_of(EngineLostError(f"vLLM's engine exited before it {what}"))
                self._nodes.lost.check()
                if time.monotonic() >= end:
                    raise TimeoutError
            return answer.result()
        except EngineDeadError as error:
            seen = EngineLostError(f"vLLM's engine exited before it {what}: {error}")
            raise await self._nodes.cause_of(seen) from error
        finally:
            answer.cancel()

    def _refuse_while_running(self, what: str) -> None:
        if self._num_running:
            raise RolloutError(f"{self._num_running} responses are being generated: {what}")

    def _check_ready(self) -> None:
        # In flight, vLLM is paused from the beginning of a push until all of it has arrived, and requests wait.
        if self._asleep or not (self._has_weights or self.options.updates_in_flight):
            raise RolloutError(
                "the engine has no weights: it released them when it slept, or the last push broke off; wake it and "
                "push weights first"
            )

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise RolloutError("the engine does not run: call start() first, and nothing after shutdown()")
        return self._llm


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
