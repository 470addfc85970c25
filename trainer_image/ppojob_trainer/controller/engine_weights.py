"""When the engines get new weights: as a phase that has their pools for itself, or in flight, while they generate.

Called by `ppo`, which decides after which steps. In flight, the engines pause between two of their steps until they
have the weights; the samples stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppojob_trainer.controller.phases import Phase, Phases
from ppojob_trainer.controller.ports import Metrics
from ppojob_trainer.controller.weights_port import WeightsPort

__all__ = ["EngineWeights"]


class EngineWeights:
    """Sends the policy's weights to the engines."""

    def __init__(self, weights: WeightsPort, phases: Phases, roles: Sequence[str], *, in_flight: bool) -> None:
        """`roles`: those under which engines generate; the rollout's own is first."""
        self._weights, self._phases, self._in_flight = weights, phases, in_flight
        self._own, *self._shared = roles
        self._spans: list[tuple[float, float | None]] = []
        """Start and end of pushes in flight; None: it is running."""

    @property
    def are_released(self) -> bool:
        """See `WeightsPort`."""
        return self._weights.are_released

    async def push(self, step: int, version: int) -> Metrics:
        """Send the policy's weights, which are those of `version`, as a phase of `step`."""
        pushing = self._weights.push(version)
        if self._in_flight:
            # Generation has the turn of its pools, and the engines take the weights between two of their steps.
            self._spans.append((self._phases.now(), None))
            found = await self._phases.run(Phase.UPDATE_WEIGHTS, self._own, step, pushing)
            self._spans[-1] = (self._spans[-1][0], self._phases.now())
            return found
        # Engines that slept allocate memory, so the other roles of their pools must not compute meanwhile.
        also = self._shared if self.are_released else []
        return await self._phases.run_alone(Phase.UPDATE_WEIGHTS, self._own, step, pushing, also=also)

    def compared_metrics(self) -> Metrics:
        """Return training/compared_weights_version, also in a step without a push; nothing before a comparison."""
        version = self._weights.compared_version
        return {} if version is None else {"training/compared_weights_version": float(version)}

    def paused_metrics(self, start: float) -> Metrics:
        """Return rollout/paused_s: the seconds in which pushes in flight interrupted a generation since its `start`.

        Generations end in the order in which they start, so earlier pushes are forgotten.
        """
        if not self._in_flight:
            return {}
        now = self._phases.now()
        spans = [(begin, now if end is None else end) for begin, end in self._spans]
        self._spans = [span for span in self._spans if span[1] is None or span[1] > start]
        return {"rollout/paused_s": sum(max(0.0, end - max(begin, start)) for begin, end in spans)}
