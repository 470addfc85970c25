"""Replicas that lose their engine in the middle of a generation, after some responses were reported, or each push.

A worker's process must be able to import them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil  # type: ignore[import-untyped]

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.protocol import DataProto
from ppojob_trainer.telemetry import current_phase
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.worker_process import WorkerContext

LOST_POOL, LOST_STEP = "critic", 2
"""The engine of this pool is lost in this step."""
LOSS_LIMIT_S = 600.0
"""Until it has made some responses: vLLM on a busy machine."""


class _LosesAnEngine(RolloutWorker):
    """Before the loss, the other engine reports nothing of the step: it cannot take all samples meanwhile."""

    num_parts = 0
    has_waited = False

    def _batch(self, prompt_ids: list[list[int]], written: Sequence[Any]) -> DataProto:
        phase = current_phase()
        if phase is not None and (phase.phase, phase.step) == ("gen", LOST_STEP):
            if phase.role != f"rollout_{LOST_POOL}":
                self.wait_for_loss()
            else:
                self.num_parts += 1
                if self.is_time():
                    self.marker.touch()
                    self.lose()
        return super()._batch(prompt_ids, written)

    @property
    def marker(self) -> Path:
        """The file that says that the engine is lost; the replicas of a run have their logs in one folder."""
        return self.context.log_file.parent / "an-engine-is-lost"

    def wait_for_loss(self) -> None:
        """Wait until the engine is lost, for at most ten minutes of the run."""
        deadline = time.monotonic() + LOSS_LIMIT_S
        while not (self.has_waited or self.marker.exists()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.has_waited = True

    def is_time(self) -> bool:
        """Whether the engine is lost before it stores this part of its responses."""
        raise NotImplementedError

    def lose(self) -> None:
        raise NotImplementedError


class LosesItsProcess(_LosesAnEngine):
    """Its process is killed, with the part of its responses that it has stored."""

    def is_time(self) -> bool:
        return self.num_parts == 2

    def lose(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class LosesVllm(_LosesAnEngine):
    """The process of vLLM that computes is killed, as early as possible, while it has prompts."""

    has_lost = False

    def is_time(self) -> bool:
        # How many parts an engine has depends on the other engine's speed.
        return not self.has_lost and bool(self._drawn.prompts)

    def lose(self) -> None:
        self.has_lost = True
        kill_children()


class LosesIdleVllm(RolloutWorker):
    """The process of vLLM that computes is killed when the engine is asked, before a push, whether it runs."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec, pool: str) -> None:
        super().__init__(context, spec, pool)
        check = self._engine.check

        def after_a_kill() -> None:
            phase = current_phase()
            if pool == LOST_POOL and phase is not None and phase.step == LOST_STEP:
                kill_children()
                deadline = time.monotonic() + LOSS_LIMIT_S
                while not self._engine._running().errored and time.monotonic() < deadline:
                    time.sleep(0.1)
            check()

        cast("Any", self._engine).check = after_a_kill


class LosesPushes(RolloutWorker):
    """Its engine receives the weights of each push and keeps those of the model's folder."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec, pool: str) -> None:
        super().__init__(context, spec, pool)
        extension = {"worker_extension_cls": "tests.integration.trainer.format_extension.DroppingExtension"}
        options = self._engine.options
        self._engine.options = replace(options, engine_args={**options.engine_args, **extension})


def kill_children() -> None:
    """Kill all processes of vLLM that this replica started."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=60)
