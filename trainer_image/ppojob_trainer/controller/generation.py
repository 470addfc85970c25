"""Generation by all engines of a job: those in the rollout's own pool, and those in pools that are shared with it.

Each pool's engines get consecutive rows in proportion to their number, so that nearly all samples of a prompt stay in
one pool. Generation is a phase of each pool and waits for its turn there: the engines in the critic's pool start when
the critic's update is done. If no engine sleeps, those of the rollout's own pool generate meanwhile; if engines sleep,
sending the weights wakes them all, and has waited for the critic. Called by `ppo` and `loop`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic

from ppojob_trainer.controller.forward import gather_or_cancel, join_parts
from ppojob_trainer.controller.phases import Phase, Phases
from ppojob_trainer.controller.ports import B, Ports, Rollout, RolloutPort

__all__ = ["OWN", "Generation", "divided"]

OWN = "rollout"
"""The role of the engines in the rollout's own pool."""


class Generation(Generic[B]):
    """Generates responses with all engines."""

    def __init__(self, ports: Ports[B], phases: Phases) -> None:
        self._own = ports.rollout
        self._engines: Mapping[str, RolloutPort[B]] = {OWN: ports.rollout, **ports.shared}
        self._phases = phases

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles under which engines generate; the rollout's own is first."""
        return tuple(self._engines)

    async def write(self, prompts: B, step: int) -> Rollout[B]:
        """Generate a response to each row."""
        return await self._write(Phase.GENERATE, prompts, step, lambda port, rows: port.generate(rows, step))

    async def validate(self, prompts: B, step: int) -> Rollout[B]:
        """Generate a response to each row with the sampling parameters of validation."""
        return await self._write(Phase.VALIDATE, prompts, step, lambda port, rows: port.generate_for_validation(rows))

    async def stream(
        self, prompts: B, step: int, take: Callable[[Sequence[int], B], None], ended: Callable[[str], None]
    ) -> Rollout[B]:
        """Do the same as `write`, and report finished rows meanwhile.

        Args:
            take: receives rows as they finish: their row numbers in the prompts, and the responses.
            ended: receives each role whose engines have generated their part, or had none, so that its pool is free.
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
        await gather_or_cancel(one(*share) for share in shares)
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

        await gather_or_cancel(follow(*share) for share in shares)
        return self._own.joined(join_parts(parts))

    def _shares(self, num_rows: int) -> list[tuple[str, RolloutPort[B], range]]:
        """Return (role, engines, rows) for each pool; pools that would get no rows are left out."""
        shares = divided(num_rows, [port.num_replicas for port in self._engines.values()])
        each = zip(self._engines.items(), shares, strict=True)
        return [(role, port, numbers) for (role, port), numbers in each if numbers]


def divided(num_rows: int, weights: Sequence[int]) -> list[range]:
    """Divide rows into consecutive parts: at least one row each, the rest in proportion to the weights.

    Engines that generate nothing would not go to sleep afterwards and would keep their memory while other roles compute
    there. The last parts are empty only if there are fewer rows than parts.
    """
    spare, total = max(0, num_rows - len(weights)), sum(weights)
    ends = [min(num_rows, n + spare * sum(weights[:n]) // total) for n in range(1, len(weights) + 1)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
