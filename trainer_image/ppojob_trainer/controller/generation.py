"""Generation by all engines of a job: those in the rollout's own pool, and those in pools that are lent to it.

Each pool's engines get rows in proportion to their number, in order, so that nearly all samples of a prompt stay
together. In each pool it is a phase, which waits for its turn there: the engines in the critic's pool begin when the
critic's update is done. Those of the rollout's own pool write already, if no engine sleeps; else the weights, which
wake them all, have waited for the critic. Called by `ppo` and `loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic

from ppojob_trainer.controller.forward import join_parts, together
from ppojob_trainer.controller.phases import Phase, Phases
from ppojob_trainer.controller.ports import B, Ports, Rollout, RolloutPort

__all__ = ["OWN", "Generation", "divided"]

OWN = "rollout"
"""The role of the engines in the rollout's own pool."""


class Generation(Generic[B]):
    """Writes responses with all engines."""

    def __init__(self, ports: Ports[B], phases: Phases) -> None:
        self._own = ports.rollout
        self._engines: Mapping[str, RolloutPort[B]] = {OWN: ports.rollout, **ports.lent}
        self._phases = phases

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles under which engines write, the rollout's own first."""
        return tuple(self._engines)

    async def write(self, prompts: B, step: int) -> Rollout[B]:
        """Write a response to each row."""
        return await self._write(Phase.GENERATE, prompts, step, lambda port, rows: port.generate(rows, step))

    async def validate(self, prompts: B, step: int) -> Rollout[B]:
        """Write a response to each row, with the sampling of validation."""
        return await self._write(Phase.VALIDATE, prompts, step, lambda port, rows: port.generate_for_validation(rows))

    async def stream(
        self, prompts: B, step: int, take: Callable[[Sequence[int], B], None], ended: Callable[[str], None]
    ) -> Rollout[B]:
        """`write`, and tell meanwhile what is done.

        Args:
            take: gets rows as they are finished: their numbers among the prompts, and the responses.
            ended: gets each role whose engines have written their part, or have none, so that its pool is free.
        """
        parts: list[tuple[Sequence[int], B]] = []

        async def follow(port: RolloutPort[B], numbers: range) -> None:
            async for finished in port.stream(prompts.take(numbers), step):
                rows = [numbers[row] for row in finished.rows]
                parts.append((rows, finished.batch))
                take(rows, finished.batch)

        async def one(role: str, port: RolloutPort[B], numbers: range) -> None:
            await self._phases.run_alone(Phase.GENERATE, role, step, follow(port, numbers))
            ended(role)

        shares = self._shares(len(prompts))
        for role in self._engines.keys() - {role for role, _, _ in shares}:
            ended(role)
        await together(one(*share) for share in shares)
        return self._own.joined(join_parts(parts))

    async def _write(
        self,
        phase: str,
        prompts: B,
        step: int,
        write: Callable[[RolloutPort[B], B], Coroutine[Any, Any, Rollout[B]]],
    ) -> Rollout[B]:
        shares = self._shares(len(prompts))
        if len(shares) == 1:
            ((role, port, _),) = shares
            return await self._phases.run_alone(phase, role, step, write(port, prompts))
        parts: list[tuple[Sequence[int], B]] = []

        async def follow(role: str, port: RolloutPort[B], numbers: range) -> None:
            work = write(port, prompts.take(numbers))
            parts.append((numbers, (await self._phases.run_alone(phase, role, step, work)).batch))

        await together(follow(*share) for share in shares)
        return self._own.joined(join_parts(parts))

    def _shares(self, num_rows: int) -> list[tuple[str, RolloutPort[B], range]]:
        """Return who writes which rows; engines that would get none are left out."""
        shares = divided(num_rows, [port.num_replicas for port in self._engines.values()])
        each = zip(self._engines.items(), shares, strict=True)
        return [(role, port, numbers) for (role, port), numbers in each if numbers]


def divided(num_rows: int, weights: Sequence[int]) -> list[range]:
    """Cut rows into parts in order, so that all rows are in one of them: one for each, the others by the weights.

    Engines that write nothing would not sleep afterwards, and keep their memory while others compute there. Only with
    fewer rows than parts the last parts are empty.
    """
    spare, total = max(0, num_rows - len(weights)), sum(weights)
    ends = [min(num_rows, n + spare * sum(weights[:n]) // total) for n in range(1, len(weights) + 1)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
