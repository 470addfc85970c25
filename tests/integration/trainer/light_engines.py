"""Replicas and an actor without vLLM and FSDP, which make responses of a seed and of the weights that they have.

Everything else is real: the processes, the queue of samples, the stored rows, the links by which weights are sent. So a
test can lose and add nodes within a minute. Importable in Ray's processes.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import EngineLostError
from ppojob_trainer.engines.rollout.generation import Generation
from ppojob_trainer.engines.rollout.options import Capacity, SamplingOptions
from ppojob_trainer.engines.weights.buckets import TensorSpec
from ppojob_trainer.engines.weights.plans import WeightLink
from ppojob_trainer.engines.weights.receipts import Receipt
from ppojob_trainer.engines.weights.receiver import WeightReceiver
from ppojob_trainer.protocol import DataProto
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.data import DataWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker, _Drawn
from ppojob_trainer.worker_groups.worker_process import WorkerContext

NUM_TENSORS, SHAPE = 3, (64, 64)
RESPONSE_S = 0.2
"""Seconds for a response."""
LOST_IN_PUSH = 3
"""The version that the engine of rank 1 does not receive to the end: its node is killed."""


def limit_parts(folder: Path, rank: int, number: int) -> Path:
    """Let a replica report so many parts of its responses and no more, until the returned file is deleted.

    So a test can kill its node in mid-generation, however slow the machine is.

    Args:
        folder: of the logs.
    """
    file = folder / f"parts-of-replica-{rank}"
    # A replica that reads it meanwhile must not find it empty.
    aside = folder / f".{file.name}"
    aside.write_text(str(number))
    return aside.rename(file)


def response_of(seed: int, weights: float) -> list[int]:
    """Return the tokens of a response."""
    return [(seed + int(weights) * place) % 1000 for place in range(2 + seed % 4)]


class LightEngine:
    """See `engines.rollout.engine.RolloutEngine`: of it what `RolloutWorker` calls."""

    loss: EngineLostError | None = None

    def __init__(self, rank: int) -> None:
        self._rank, self._weights = rank, 0.0
        self._receiver: WeightReceiver | None = None

    async def start(self, *, waits_for_gpu: bool) -> None:
        return None

    def signal_gpu_free(self) -> None:
        return None

    def capacity(self) -> Capacity:
        return Capacity(2, 0)

    def check(self) -> None:
        return None

    async def stream(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: SamplingOptions
    ) -> AsyncIterator[tuple[int, Generation]]:
        for index, seed in enumerate(seeds):
            await asyncio.sleep(RESPONSE_S)
            tokens = response_of(seed, self._weights)
            yield index, Generation(tokens, [0.0] * len(tokens), "length")

    async def connect_weights(self, places: Sequence[tuple[WeightLink, int]]) -> list[dict[str, int]]:
        if self._receiver is not None:
            self._receiver.close()
        [(link, number)] = places
        self._receiver = await asyncio.to_thread(WeightReceiver, link, number, torch.device("cpu"))
        return [{}]

    async def update_weights(self, version: int) -> list[Receipt]:
        if (self._rank, version) == (1, LOST_IN_PUSH):
            # In the middle: it has seen the announcement, and receives nothing.
            kill_node()
        return [await asyncio.to_thread(self._receive, version)]

    def _receive(self, version: int) -> Receipt:
        assert self._receiver is not None, "connect_weights() comes first"
        stream = self._receiver.begin(version)
        sums = [float(tensor.float().mean()) for _, tensor in stream]
        [self._weights] = set(sums)
        return stream.receipt()

    async def shutdown(self) -> None:
        return None


class LightReplica(RolloutWorker):
    """A replica with a light engine. num_parts: reported since there is a limit, see `limit_parts`."""

    num_parts = 0

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        self.context, self.spec = context, spec
        self._engine = cast("Any", LightEngine(context.rank))
        self._training = SamplingOptions.training(spec)
        self._validation = SamplingOptions.validation(spec)
        self._drawn = _Drawn(0)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()
        assert isinstance(self._drawn.finished, queue.SimpleQueue)

    def _batch(self, prompt_ids: list[list[int]], written: Sequence[Generation]) -> DataProto:
        while self.num_parts >= (limit := self._limit()):
            time.sleep(0.05)
        self.num_parts = 0 if limit == math.inf else self.num_parts + 1
        return super()._batch(prompt_ids, written)

    def _limit(self) -> float:
        try:
            return float((self.context.log_file.parent / f"parts-of-replica-{self.context.rank}").read_text())
        except FileNotFoundError:
            return math.inf


class _Source:
    """See `WeightSource`: tensors of one number."""

    weights = 0.0

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(f"layer.{number}", SHAPE, "float32") for number in range(NUM_TENSORS)]

    def gather(self) -> Iterator[Tensor]:
        for _ in range(NUM_TENSORS):
            yield torch.full(SHAPE, self.weights)


class LightActor(ActorWorker):
    """An actor of one rank, whose weights are one number."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        self.context, self.spec = context, spec
        self._sender = None
        self._source = _Source()
        source = self._source
        self._engine = cast("Any", SimpleNamespace(weights=lambda: source))
        self._parallel = cast("Any", SimpleNamespace(device=torch.device("cpu")))

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def train(self, weights: float) -> None:
        """Change the weights."""
        self._source.weights = weights


class LightData(DataWorker):
    """The process that keeps responses."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context


def kill_node() -> None:
    """Kill the Ray node of this process, and the process."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
