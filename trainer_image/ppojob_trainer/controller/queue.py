"""The responses that are generated before their step is trained.

On-policy, at most those of the next step. In mode OneStepOff, more. With maxStaleness 1 (vN: the weights after step N):

    rollout pool    gen 1 v0 ─ gen 2 v0 ─┬─ push v1 ─ gen 3 v1 ──┬─ push v2 ─ gen 4 v2 ── ...
    other pools               train 1 ───┘            train 2 ───┘            train 3

With maxStaleness S, weights are pushed every S steps, and S generations follow one another without waiting for the
training between two pushes. Which weights generate a step depends on its number alone and never on how long anything
takes. So a run has the same numbers whenever it is repeated, or resumed from a checkpoint.

With weight updates in flight, every step pushes its weights at once. maxStaleness bounds how old the weights are with
which a generation begins. Which weights sample a token depends on the time, so no run can be repeated exactly:

    rollout pool    gen 1 v0 ─ gen 2 v0 ──┊── gen 2 v1 ── gen 3 v1 ─┊─ gen 3 v2 ── ...      ┊ push: engines pause
    other pools               train 1 ────┊       train 2 ──────────┊ ...

A checkpoint of step N has the weights of step N only. Responses of older weights cannot be generated again after it, so
they are saved with it (`of_older_weights`); those of the weights of step N are dropped and generated again from their
seeds. Called by `ppo` and `loop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic

from ppojob_trainer.controller.forward import StreamedPhases
from ppojob_trainer.controller.ports import B, Metrics, Rollout

__all__ = ["Generated", "GenerationQueue"]


@dataclass(frozen=True)
class Generated(Generic[B]):
    """Responses to the prompts of a step; `batch` also has the columns of the prompts.

    version: the step after which the policy had the weights that generated them, or with which their generation began
    if weights are updated in flight. streamed: the forward phases that started on responses while others were
    generated. is_scored: dynamic sampling called the users' hooks after Generate and scored the responses; the batch
    has token_level_scores, and `metrics` those of sampling and scoring.
    """

    step: int
    batch: B
    rollout: Rollout[B]
    epoch: int
    version: int
    streamed: StreamedPhases[B] | None = None
    is_scored: bool = False
    metrics: Metrics = field(default_factory=dict)


@dataclass
class _Entry(Generic[B]):
    """version: of the engines' weights when the generation began; None: it waits for the one before."""

    task: asyncio.Task[Generated[B]]
    version: int | None = None


class GenerationQueue(Generic[B]):
    """Generations that are running or waiting to be trained, by step, and the version of the engines' weights."""

    def __init__(
        self,
        generate: Callable[[int, int], Coroutine[Any, Any, Generated[B]]],
        max_staleness: int = 0,
        *,
        in_flight: bool = False,
    ) -> None:
        """
        Args:
            generate: generates the responses of a step (first argument); the engines' weights have the version of the
                second one when it begins.
            max_staleness, in_flight: see `Schedule`.
        """
        self._generate = generate
        self._max_staleness, self._in_flight = max_staleness, in_flight
        self._entries: dict[int, _Entry[B]] = {}
        self._loaded = 0
        self._base = 0

    @property
    def loaded(self) -> int:
        """The version of the weights that the engines have."""
        return self._loaded

    @property
    def base(self) -> int:
        """The version from which the steps that may be generated are counted: that of the last push for generations."""
        return self._base

    def begin(self, trained: int, last: int) -> None:
        """Start the generations that need no newer weights, one after the other.

        Args:
            trained: the last step that is trained.
            last: the last step of the run.
        """
        for step in range(trained + 1, min(self._base + 1 + self._max_staleness, last) + 1):
            self._start(step)

    async def take(self, step: int) -> Generated[B]:
        """Return the responses of a step; they stay in the queue until `forget`. Starts their generation if needed."""
        self._start(step)
        # A caller that is cancelled does not end the generation: `drop` does, if it can be repeated.
        return await asyncio.shield(self._entries[step].task)

    def forget(self, step: int) -> None:
        """Remove the responses of a step whose training has begun and can no longer be dropped."""
        self._entries.pop(step, None)

    def is_due(self, step: int) -> bool:
        """Whether the engines get the weights after `step`."""
        return self._in_flight or step - self._base >= self._max_staleness

    async def idle(self) -> None:
        """Wait until no engine generates."""
        await asyncio.gather(*(asyncio.shield(entry.task) for entry in self._entries.values()))

    async def unless_failed(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`. If a generation fails before, cancel the work and raise the failure."""
        waiting = asyncio.create_task(work)
        pending: set[asyncio.Task[Any]] = {waiting, *(entry.task for entry in self._entries.values())}
        try:
            while waiting in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    def pushed(self, version: int, *, is_base: bool = True) -> None:
        """Record that the engines have new weights; `is_base`: the generations of the next steps start from them."""
        self._loaded = version
        if is_base:
            self._base = version

    async def of_older_weights(self, version: int) -> list[Generated[B]]:
        """Wait for the responses of weights older than `version`; return them in the order of their steps."""
        older = [self._entries[step] for step in sorted(self._entries) if self._version(self._entries[step]) < version]
        return list(await asyncio.gather(*(asyncio.shield(entry.task) for entry in older)))

    def restore(self, version: int, base: int) -> None:
        """Continue after step `version`, whose weights the engines get; `base` is that of the checkpoint."""
        self._loaded, self._base = version, base

    def allows(self, step: int, version: int) -> bool:
        """Whether weights of `version` are new enough for the responses of a step."""
        return step - 1 - version <= self._max_staleness

    def put(self, generated: Generated[B]) -> None:
        """Add responses that an earlier attempt generated."""
        self._entries[generated.step] = _Entry(asyncio.create_task(_done(generated)), generated.version)

    def drop(self, version: int | None = None) -> None:
        """Cancel all generations, or only those with weights of `version`, which can be repeated."""
        for step, entry in list(self._entries.items()):
            if version is None or self._version(entry) == version:
                del self._entries[step]
                entry.task.cancel()

    def _version(self, entry: _Entry[B]) -> int:
        """Return the version with which a generation has begun, or would begin now."""
        return self._loaded if entry.version is None else entry.version

    def _start(self, step: int) -> None:
        if step in self._entries:
            return
        task = asyncio.create_task(self._after(self._entries.get(step - 1), step))
        # Retrieve its exception: it is raised where the responses are awaited, or nobody needs them any more.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._entries[step] = _Entry(task)

    async def _after(self, before: _Entry[B] | None, step: int) -> Generated[B]:
        if before is not None:
            await asyncio.shield(before.task)
        version = self._entries[step].version = self._loaded
        return await self._generate(step, version)


async def _done(generated: Generated[B]) -> Generated[B]:
    return generated
