"""Which forward phases a step has, and in which chains they run. Called by `ppo`; `forward` runs them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any, Generic

from ppojob_trainer.controller.forward import ChainPhases, ForwardPhase, at_once, no_metrics
from ppojob_trainer.controller.phases import Phase, Phases
from ppojob_trainer.controller.ports import B, Metrics, Ports
from ppojob_trainer.controller.schedule import Schedule, chain_of, is_streamed
from ppojob_trainer.controller.shared_rows import Helper

__all__ = ["SCORING", "ForwardPlan"]

SCORING = (Phase.REWARD, Phase.REWARD_MODEL)
"""The phases that compute scores."""


class ForwardPlan(Generic[B]):
    """The forward phases of each step of a job.

    Args:
        pool_of: pool of each role.
        gpus: of each pool; those that are left out have one.
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
        gpus: Mapping[str, int],
        writing: Collection[str],
        *,
        has_old_log_prob: bool,
        critic_is_done: Callable[[], Awaitable[object]],
    ) -> None:
        self._ports, self._schedule, self._phases = ports, schedule, phases
        self._pool_of, self._gpus, self._writing = pool_of, gpus, writing
        self._has_old_log_prob, self._critic_is_done = has_old_log_prob, critic_is_done

    def phases(self, step: int, recorded_as: str | None = None) -> dict[str, ForwardPhase[B]]:
        """Return the forward phases of a step, in the serial order.

        Args:
            recorded_as: name of all of them in timings and traces; None: each has its own.
        """
        ports = self._ports

        def phase(
            name: str,
            computes: Mapping[str, Callable[[B], Coroutine[Any, Any, B]]],
            metrics: Callable[[B], Metrics] = no_metrics,
            ready: Callable[[], Awaitable[object]] = at_once,
        ) -> None:
            helpers = {
                role: Helper(
                    partial(self._phases.run_alone, recorded_as or name, role, step), compute, self._gpus_of(role)
                )
                for role, compute in computes.items()
            }
            found[name] = ForwardPhase.of(helpers, metrics, ready)

        found: dict[str, ForwardPhase[B]] = {}
        function, models = ports.reward.function, ports.reward.models
        if function is not None:
            phase(Phase.REWARD, {"reward": function.compute_scores}, function.metrics)
        if self._has_old_log_prob:
            phase(Phase.OLD_LOG_PROB, {"actor": ports.actor.compute_log_prob}, ports.actor.log_prob_metrics)
        if ports.critic is not None:
            phase(Phase.VALUES, {"critic": ports.critic.compute_values}, ready=self._critic_is_done)
        if ports.refs:
            phase(Phase.REF, {role: ref.compute_ref_log_prob for role, ref in ports.refs.items()})
        if models:
            computes = {role: model.compute_scores for role, model in models.items()}
            phase(Phase.REWARD_MODEL, computes, next(iter(models.values())).metrics)
        return found

    def scoring(self, step: int, recorded_as: str | None = None) -> dict[str, ForwardPhase[B]]:
        """Return those of them that compute scores."""
        return {name: phase for name, phase in self.phases(step, recorded_as).items() if name in SCORING}

    def can_score_while_generating(self) -> bool:
        """Return whether each source of scores has a pool, and a chain, in which no engine generates, or none."""
        phases = self.scoring(step=0)
        chains = self.chains(phases)
        free = {name for chain, names in chains.items() if chain not in self._writing for name in names.all}
        # Without the overlap Values, a model's phase is in the actor's chain, and its pool may be another.
        pools = {name: {self._pool_of.get(role) for role in phase.helpers} for name, phase in phases.items()}
        return all(name in free and (name == Phase.REWARD or pools[name] - set(self._writing)) for name in phases)

    def chains(self, phases: Mapping[str, ForwardPhase[B]]) -> dict[str, ChainPhases]:
        """Return the phases that must run one after the other, by the pool that they keep busy."""
        own: dict[str, list[str]] = {}
        shared: dict[str, dict[str, str]] = {}
        for name, phase in phases.items():
            chain_by_role = {role: chain_of(name, role, self._schedule, self._pool_of) for role in phase.helpers}
            if len(chains := set(chain_by_role.values())) == 1:
                own.setdefault(chains.pop(), []).append(name)
                continue
            for role, chain in chain_by_role.items():
                shared.setdefault(chain, {})[name] = role
        return {chain: ChainPhases(own.get(chain, []), shared.get(chain, {})) for chain in (own | shared)}

    def is_streamed(self, chain: str) -> bool:
        """Return whether a chain's phases may start on finished responses."""
        return is_streamed(chain, self._schedule, self._pool_of, self._writing)

    def _gpus_of(self, role: str) -> int:
        return self._gpus.get(self._pool_of.get(role, ""), 1)
