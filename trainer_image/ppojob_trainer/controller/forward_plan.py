"""Which forward phases a step has, and in which chains they run. Called by `ppo`; `forward` runs them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, Generic

from ppojob_trainer.controller.forward import ForwardPhase, at_once, no_metrics
from ppojob_trainer.controller.phases import Phase, Phases
from ppojob_trainer.controller.ports import B, Metrics, Ports
from ppojob_trainer.controller.schedule import Schedule, chain_of, is_streamed

__all__ = ["SCORING", "ForwardPlan"]

SCORING = (Phase.REWARD, Phase.REWARD_MODEL)
"""The phases that compute scores."""


class ForwardPlan(Generic[B]):
    """The forward phases of each step of a job.

    Args:
        pool_of: pool of each role.
        writing: the pools in which engines generate.
        has_old_log_prob: see `schedule.leaves_out_old_log_prob`.
        critic_is_done: waits for the critic's update of the last step.
    """

    def __init__(
        self,
        ports: Ports[B],
        schedule: Schedule,
        phases: Phases,
        pool_of: Mapping[str, str],
        writing: Collection[str],
        *,
        has_old_log_prob: bool,
        critic_is_done: Callable[[], Awaitable[object]],
    ) -> None:
        self._ports, self._schedule, self._phases = ports, schedule, phases
        self._pool_of, self._writing = pool_of, writing
        self._has_old_log_prob, self._critic_is_done = has_old_log_prob, critic_is_done

    def phases(self, step: int) -> dict[str, ForwardPhase[B]]:
        """Return the forward phases of a step, in the serial order."""
        ports = self._ports

        def phase(
            name: str,
            role: str,
            compute: Callable[[B], Coroutine[Any, Any, B]],
            metrics: Callable[[B], Metrics] = no_metrics,
            ready: Callable[[], Awaitable[object]] = at_once,
        ) -> None:
            def run(batch: B) -> Coroutine[Any, Any, B]:
                return self._phases.run_alone(name, role, step, compute(batch))

            found[name] = ForwardPhase(role, run, metrics, ready)

        found: dict[str, ForwardPhase[B]] = {}
        if ports.reward.function is not None:
            phase(Phase.REWARD, "reward", ports.reward.function.compute_scores, ports.reward.function.metrics)
        if self._has_old_log_prob:
            phase(Phase.OLD_LOG_PROB, "actor", ports.actor.compute_log_prob, ports.actor.log_prob_metrics)
        if ports.critic is not None:
            phase(Phase.VALUES, "critic", ports.critic.compute_values, ready=self._critic_is_done)
        if ports.ref is not None:
            phase(Phase.REF, "ref", ports.ref.compute_ref_log_prob)
        if ports.reward.model is not None:
            phase(Phase.REWARD_MODEL, "reward_model", ports.reward.model.compute_scores, ports.reward.model.metrics)
        return found

    def scoring(self, step: int) -> dict[str, ForwardPhase[B]]:
        """Return those of them that compute scores."""
        return {name: phase for name, phase in self.phases(step).items() if name in SCORING}

    def chains(self, phases: Mapping[str, ForwardPhase[B]]) -> dict[str, list[str]]:
        """Return the phases that must run one after the other, by the pool that they keep busy."""
        chains: dict[str, list[str]] = {}
        for name, phase in phases.items():
            chain = chain_of(name, phase.role, self._schedule, self._pool_of)
            chains.setdefault(chain, []).append(name)
        return chains

    def is_streamed(self, chain: str) -> bool:
        """Return whether a chain's phases may start on finished responses."""
        return is_streamed(chain, self._schedule, self._pool_of, self._writing)
