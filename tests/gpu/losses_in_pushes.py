"""Processes of a job that loses an engine in the middle of a push of the weights.

    actor      sends half of the tensors ─ "half" ─ waits until they have ended ─ sends the others
    replica    receives ─ sees "half" ─ writes which processes are lost ─ kills them

The last replica of the last pool in `placement.rollout` is lost. Files in the run's folder connect the two. A worker's
process must be able to import this module. `test_lost_engines_on_cuda` uses it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil  # type: ignore[import-untyped]
import torch

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.weights.buckets import TensorSpec, WeightSource
from ppojob_trainer.engines.weights.plans import LinkPlan
from ppojob_trainer.engines.weights.receipts import Receipt
from ppojob_trainer.engines.weights.sender import WeightSender
from ppojob_trainer.worker_groups.roles import actor as actor_module
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.worker_process import WorkerContext
from tests.gpu.link_ranks import wait_for, write
from tests.integration.trainer.attempts import core_of
from tests.processes import left_of

LOST_STEP = 2
"""The engine is lost in the push after this step."""
_END_S = 30.0


@dataclass(frozen=True)
class Loss:
    """at: the time (as `time.time`). processes: the numbers of those that end with it."""

    at: float
    processes: list[int]

    def left(self) -> list[int]:
        """Return the processes that still run after a while."""
        found = []
        for number in self.processes:
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(number))
        return [process.pid for process in left_of(found, _END_S)]

    @classmethod
    def read(cls, root: Path) -> Loss:
        """Return the loss of a run."""
        return cls(**json.loads(_loss(root).read_text()))


def _half(root: Path) -> Path:
    return root / "half-of-the-weights"


def _loss(root: Path) -> Path:
    return root / "loss"


class PausingActor(ActorWorker):
    """Sends each tensor in a separate bucket, and waits for the loss in the middle of a push."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        super().__init__(context, spec)
        assert context.run_folder is not None, "a job has a folder"
        cast("Any", actor_module).WeightSender = partial(_PausingSender, context.run_folder)


class _PausingSender(WeightSender):
    def __init__(
        self,
        root: Path,
        source: WeightSource,
        plans: Sequence[LinkPlan],
        address: str,
        timeout_seconds: float,
        device: torch.device,
    ) -> None:
        self._root, self._pausing = root, _PausingSource(root, source)
        super().__init__(self._pausing, plans, address, timeout_seconds, device, bucket_bytes=1)

    def push(self, version: int, *, is_partial: bool = False) -> list[Receipt]:
        self._pausing.pauses = version == LOST_STEP and not _half(self._root).exists()
        return super().push(version, is_partial=is_partial)


class _PausingSource:
    """See `WeightSource`."""

    pauses = False

    def __init__(self, root: Path, source: WeightSource) -> None:
        self._root, self._source = root, source

    def specs(self) -> list[TensorSpec]:
        return list(self._source.specs())

    def gather(self) -> Iterator[torch.Tensor]:
        half = len(self.specs()) // 2
        for number, tensor in enumerate(self._source.gather()):
            if self.pauses and number == half:
                write(_half(self._root))
                wait_for(_loss(self._root))
                assert Loss.read(self._root).left() == []
            yield tensor


class _LosesInPush(RolloutWorker):
    def __init__(self, context: WorkerContext, spec: PPOJobSpec, pool: str) -> None:
        super().__init__(context, spec, pool)
        if (pool, context.rank) == (spec.placement.rollout_pools[-1], context.world_size - 1):
            cast("Any", self._engine).update_weights = partial(self._update, self._engine.update_weights)

    async def _update(self, update: Any, version: int) -> list[Receipt]:
        receiving = asyncio.create_task(update(version))
        if version == LOST_STEP:
            root = self.context.run_folder
            assert root is not None, "a job has a folder"
            await asyncio.to_thread(wait_for, _half(root))
            core = core_of(psutil.Process())
            loss = Loss(time.time(), [*self.own(), core.pid])
            write(_loss(root), json.dumps(asdict(loss)))
            self.lose(core)
        receipts: list[Receipt] = await receiving
        return receipts

    def own(self) -> list[int]:
        """Return the number of this process if it is lost."""
        return []

    def lose(self, core: psutil.Process) -> None:
        raise NotImplementedError


class LosesVllmInPush(_LosesInPush):
    """The process of vLLM that receives is killed."""

    def lose(self, core: psutil.Process) -> None:
        core.kill()


class LosesItsProcessInPush(_LosesInPush):
    """The replica's process is killed, and that of vLLM ends with it."""

    def own(self) -> list[int]:
        return [os.getpid()]

    def lose(self, core: psutil.Process) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
