"""One rollout replica: vLLM's asynchronous engine, its weights and its sleep mode.

Called by the rollout role, in an event loop. A child process of vLLM computes; this object sends requests and weights
to it. It refuses to receive weights while it generates, and to generate without weights.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import vllm
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from ppojob_api.v1alpha1.engine_rules import SCHEDULING_ARGS
from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import EngineArgumentError, EngineLostError, GenerationTimeoutError, RolloutError
from ppojob_trainer.engines.rollout.options import (
    GPU_FREE_FILE,
    GPU_WORKER,
    NO_DRAFTS,
    SCHEDULER,
    Capacity,
    Drafts,
    RolloutOptions,
    SamplingOptions,
    engine_arguments,
)
from ppojob_trainer.engines.rollout.scheduler import is_supported
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.transfer import Receipt, WeightLink

# Sleep level 2 releases weights and cache: the next weights come from the trainer in any case.
SLEEP_LEVEL_DISCARD: Final = 2


@dataclass(frozen=True)
class Generation:
    """One response: its tokens, their log-probs (nats) under the distribution they were sampled from, why it ended.

    log_probs is None if the sampling options did not request them. drafts: with `rollout.speculative` alone.
    """

    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: str
    drafts: Drafts = NO_DRAFTS


class RolloutEngine:
    """See the module's docstring. Start the process with `options.environment`."""

    def __init__(self, options: RolloutOptions) -> None:
        self.options = options
        self.weights_version = 0
        """Version of the loaded weights; 0: those of the model's folder."""
        self._llm: AsyncLLM | None = None
        self._request_ids = itertools.count()
        self._num_running = 0
        self._is_asleep = False
        self._has_weights = True
        self._folder = tempfile.TemporaryDirectory(prefix="ppojob-rollout-")

    def signal_gpu_free(self) -> None:
        """Let a waiting `start` on CUDA continue: the other roles' models are loaded and idle.

        vLLM allocates its share of the GPU's whole memory, and refuses to start if less is free.
        """
        self._gpu_free_file.touch()

    def capacity(self) -> Capacity:
        """Return what the engine computes at the same time; it must have started."""
        config = self._running().vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        return Capacity(scheduler.max_num_seqs, (cache.num_gpu_blocks or 0) * (cache.block_size or 0))

    @property
    def _gpu_free_file(self) -> Path:
        return Path(self._folder.name) / "gpu-is-free"

    async def start(self, *, waits_for_gpu: bool = False) -> None:
        """Load the model and make the engine ready; 20 to 60 s.

        Args:
            waits_for_gpu: on CUDA, import libraries and wait for `signal_gpu_free` before the GPU's memory is measured.

        Raises:
            EngineArgumentError: vLLM has no argument of a name in `rollout.engineArgs`, or refuses its value.
            RolloutError: vLLM could not start; the cause is chained.
        """
        # Inductor moves Triton's kernel folder when it compiles, but not when it loads cached code. vLLM would then
        # look for its kernels in the wrong folder and compile them again, which takes ten seconds.
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
        arguments = checked_arguments(self.options)
        if waits_for_gpu and self.options.device is Device.CUDA:
            os.environ[GPU_FREE_FILE] = str(self._gpu_free_file)
            arguments.worker_cls = GPU_WORKER
        try:
            # It blocks for long; the event loop must serve the owner's other calls meanwhile.
            self._llm = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments)
        except (RuntimeError, ValueError, OSError) as error:
            raise RolloutError(f"vLLM could not start with the model {self.options.path}: {error}") from error
        if self.options.speculative is not None:
            await self._workers("ppojob_verify_by_seed")

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

    async def update_weights(self, version: int) -> Receipt:
        """Load the weights that the trainer's `push(version)` sends at the same time.

        Raises:
            RolloutError: the engine is generating or asleep, or the transfer failed.
        """
        self._refuse_while_running("weights cannot change under them")
        receipts = await self._workers("ppojob_receive_weights", version)
        # The prefix cache holds results of the old weights.
        await self.reset_prefix_cache()
        self.weights_version, self._has_weights = version, True
        first = receipts[0]
        if any(receipt != first for receipt in receipts):
            raise RolloutError(f"the {len(receipts)} workers of a replica loaded different weights: {receipts}")
        return Receipt(**{**first, "checksums": tuple(first["checksums"])})

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache."""
        await self._running().reset_prefix_cache()

    async def sleep(self) -> None:
        """Release weights and cache if the GPU is shared (see the options). New weights must then be sent."""
        if not self.options.sleeps or self.options.device is Device.CPU or self._is_asleep:
            return
        self._refuse_while_running("the engine cannot sleep now")
        try:
            await self._running().sleep(level=SLEEP_LEVEL_DISCARD)
        except EngineDeadError as error:
            raise EngineLostError(f"vLLM's engine exited before it slept: {error}") from error
        self._is_asleep, self._has_weights = True, False

    async def wake(self, part: str | None = None) -> None:
        """Allocate memory again: `weights` before a push, then `kv_cache`; None allocates both."""
        if not self._is_asleep:
            return
        await self._running().wake_up(tags=None if part is None else [part])
        self._is_asleep = part == "weights"

    def check(self) -> None:
        """Find out whether the engine still runs.

        Raises:
            EngineLostError: one of its processes exited.
        """
        if self._running().errored:
            raise EngineLostError("vLLM's engine exited while it was idle")

    async def shutdown(self) -> None:
        """Terminate the engine and its child process. It cannot be used afterwards."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        # In this thread: vLLM's task that reads answers must be cancelled before it sees the child exit.
        llm.shutdown()
        self._folder.cleanup()

    async def _one(self, index: int, prompt: list[int], seed: int, sampling: SamplingOptions) -> tuple[int, Generation]:
        request_id = f"ppojob-{next(self._request_ids)}"
        final = None
        try:
            async for output in self._running().generate(
                {"prompt_token_ids": prompt}, sampling_parameters(sampling, seed), request_id
            ):
                final = output
        except EngineDeadError as error:
            raise EngineLostError(f"vLLM's engine exited: {error}") from error
        except (EngineGenerateError, ValueError) as error:
            raise RolloutError(f"vLLM failed at prompt {index} of {len(prompt)} tokens: {error}") from error
        if final is None:
            raise RolloutError(f"vLLM ended prompt {index} without an answer")
        completion = final.outputs[0]
        return index, Generation(
            list(completion.token_ids),
            _log_probs(completion.logprobs) if sampling.log_probs else None,
            str(completion.finish_reason),
            _drafts(len(completion.token_ids), completion.spec_decode_metrics),
        )

    async def _workers(self, method: str, *arguments: Any) -> list[Any]:
        try:
            results: list[Any] = await asyncio.wait_for(
                self._running().collective_rpc(method, args=arguments), self.options.timeout_seconds
            )
        except TimeoutError as error:
            raise RolloutError(
                f"vLLM's workers did not finish {method} within {self.options.timeout_seconds:g} s"
            ) from error
        except Exception as error:
            # vLLM passes a worker's failure on as a plain Exception with the worker's message.
            raise RolloutError(f"vLLM's workers failed in {method}: {error}") from error
        return results

    def _refuse_while_running(self, what: str) -> None:
        if self._num_running:
            raise RolloutError(f"{self._num_running} responses are being generated: {what}")

    def _check_ready(self) -> None:
        if self._is_asleep or not self._has_weights:
            raise RolloutError("the engine released its weights when it slept: wake it and push weights first")

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise RolloutError("the engine does not run: call start() first, and nothing after shutdown()")
        return self._llm


def checked_arguments(options: RolloutOptions) -> AsyncEngineArgs:
    """Return vLLM's arguments.

    Raises:
        EngineArgumentError: vLLM has no argument of a name in `rollout.engineArgs`, or refuses its value.
    """
    known = [field.name for field in fields(AsyncEngineArgs)]
    for name in options.engine_args:
        if name not in known:
            near = ", ".join(get_close_matches(name, known)) or "none of a similar name"
            raise EngineArgumentError(
                f"spec.rollout.engineArgs.{name}: vLLM {vllm.__version__} has no such argument (near: {near}); correct "
                "the name or leave it out"
            )
    arguments = engine_arguments(options)
    if is_supported(vllm.__version__) and not SCHEDULING_ARGS & options.engine_args.keys():
        arguments["scheduler_cls"] = SCHEDULER
    elif options.speculative is not None:
        raise EngineArgumentError(
            f"spec.rollout.speculative: the trainer's scheduler does not know vLLM {vllm.__version__}; remove it, or "
            "use the image's vLLM"
        )
    try:
        return AsyncEngineArgs(**arguments)
    except (TypeError, ValueError) as error:
        raise EngineArgumentError(
            f"spec.rollout.engineArgs: vLLM refuses {dict(options.engine_args)}: {error}; correct the values"
        ) from error


def sampling_parameters(sampling: SamplingOptions, seed: int) -> SamplingParams:
    """Return vLLM's sampling parameters for one response."""
    return SamplingParams(
        n=1,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop) or None,
        ignore_eos=sampling.ignore_eos,
        # A greedy request samples nothing; a random generator for it would only cost time.
        seed=None if sampling.temperature == 0 else seed,
        logprobs=0 if sampling.log_probs else None,
        flat_logprobs=sampling.log_probs,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _log_probs(flat: Any) -> list[float]:
    """The first entry of each position is the sampled token's."""
    values = [float(flat.logprobs[start]) for start in flat.start_indices]
    if not all(math.isfinite(value) for value in values):
        raise RolloutError("vLLM returned a log-prob that is not finite: the weights are broken")
    return values


def _drafts(num_tokens: int, metrics: Any) -> Drafts:
    """Return how a response of so many tokens was generated; `metrics`: vLLM's, if it drafts."""
    if metrics is None:
        return NO_DRAFTS
    num_drafted = sum(metrics.histogram)
    num_accepted = sum(number * steps for number, steps in enumerate(metrics.histogram))
    # Drafts after the token that ended the response are counted as accepted, too.
    return Drafts(max(num_drafted, num_tokens - num_accepted), num_drafted, num_accepted)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
