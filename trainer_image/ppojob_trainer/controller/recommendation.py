"""Recommends pool sizes from the measured phases: sentences for people, and layouts for programs.

It answers six questions, each only if the gain is large enough:

* Which pool could do with fewer GPUs?
* Which pool would gain from more GPUs?
* Would some GPUs be more useful in another pool?
* Which pool should be shared with the rollout?
* Which pool should have a copy of the reference, or of the reward model?
* In one pool: should the reward function score responses while others are generated?

The times come from `prediction`; `cost_model` says what they leave out. With fewer GPUs each one stores more of a
model, and a pool that is shared with the rollout also stores an engine. If memory was measured, layouts that might not
fit are left out. Pure; called by `main`'s monitor.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ppojob_api.v1alpha1.pools import REWARD_MODEL, Pool, Role
from ppojob_api.v1alpha1.reported import LayoutAdvice, PoolSize
from ppojob_api.v1alpha1.resolve import ONLY_BETWEEN_POOLS
from ppojob_api.v1alpha1.rules import check
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import ScheduleMode
from ppojob_trainer.controller.cost_model import fit
from ppojob_trainer.controller.layout import layout_of
from ppojob_trainer.controller.phases import Phase
from ppojob_trainer.controller.pool_sizes import fewer, more, moved, total_gpus
from ppojob_trainer.controller.prediction import evenness, observations, predict
from ppojob_trainer.controller.step_time import Layout

__all__ = ["NUM_STEPS", "Recommendation", "recommend"]

NUM_STEPS: Final = 10
MIN_STEPS: Final = 3
MAX_COST: Final = 0.05
"""Share of the step time that fewer GPUs may cost. It must also be at most a third of the share of GPUs saved."""
MIN_GAIN: Final = 0.05
"""Smallest gain that is reported, as a share of the step time. It does not bound the prediction's error, which was at
most 8 % of the step time between one pool and two on two GPUs, if all responses had the same length (docs/measured.md).
Pools of other sizes were not measured. So a gain is a reason to measure, and the sentence says that it is predicted."""
MIN_EVENNESS: Final = 0.6
"""Smallest ratio of mean to longest response length at which sharing a pool is recommended if responses stream."""
_A_STEP = "timing_s/update_actor"


@dataclass(frozen=True)
class Recommendation:
    """Sentences, and the layouts that they recommend; both are empty if no other layout is better."""

    text: str = ""
    layouts: tuple[LayoutAdvice, ...] = ()


@dataclass(frozen=True)
class _Option:
    """Other pool sizes; change: of the step time, as a share of it."""

    pools: Sequence[Pool]
    change: float

    @property
    def gpus(self) -> int:
        return total_gpus(self.pools)

    def advice(self) -> LayoutAdvice:
        return LayoutAdvice(
            pools=[PoolSize(name=p.name, nodes=p.nodes, gpus_per_node=p.gpus_per_node) for p in self.pools],
            gpus=self.gpus,
            step_time_percent=round(100 * self.change),
        )


def recommend(steps: Sequence[Mapping[str, float]], spec: PPOJobSpec, layout: Layout) -> Recommendation | None:
    """Return the recommendation for this layout; None while too few steps were measured, or with an elastic pool.

    Args:
        steps: metrics of the last steps, without the first step of a run, which compiles and allocates.
        spec: resolved.
        layout: the layout of `spec`.
    """
    last = [metrics for metrics in steps if _A_STEP in metrics][-NUM_STEPS:]
    if len(last) < MIN_STEPS or any(pool.elastic for pool in spec.pools):
        # The times of an elastic pool are those of a changing number of engines.
        return None
    costs = fit(observations(last, layout))
    now = predict(costs, layout).seconds

    def options(possible: Iterable[list[Pool]]) -> list[_Option]:
        fitting = (pools for pools in possible if _fit_memory(pools, spec, layout, last))
        layouts = ((pools, replace(layout, gpus={pool.name: pool.gpus for pool in pools})) for pools in fitting)
        return [_Option(pools, predict(costs, other).seconds / now - 1) for pools, other in layouts]

    chosen = {
        _say_fewer: _cheapest(options(fewer(spec)), total_gpus(spec.pools)),
        _say_more: _fastest(options(more(spec))),
        _say_moved: _fastest(options(moved(spec))),
    }
    said = {say: option for say, option in chosen.items() if option is not None}
    busy = {pool.name: _busy(last, pool.name) for pool in spec.pools}
    noun = "GPU" if spec.device is Device.CUDA else "worker"
    sentences = [say(_Words(spec.pools, noun, busy, len(last)), option) for say, option in said.items()]
    others = [(_shared(spec, last), _SHARED), (_with_copy(spec, last, Role.REF, Role.REF), _WITH_REFERENCE)]
    if spec.reward.uses_model:
        others.append((_with_copy(spec, last, Role.REWARD, REWARD_MODEL), _WITH_REWARD_MODEL))
    for other, words in others:
        changes = {name: predict(costs, layout_of(changed)).seconds / now - 1 for name, changed in other}
        sentences += _say_placed(changes, words)
    sentences += _say_streamed(spec, last, now)
    text = f"{'; '.join(sentences)} (predicted)" if sentences else ""
    return Recommendation(text, tuple(option.advice() for option in said.values()))


def _shared(spec: PPOJobSpec, steps: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, PPOJobSpec]]:
    """Yield each further pool that could be shared with the rollout, with the spec that shares it.

    Yields nothing for CPU engines, because they would compete for the cores of a node. Yields nothing if responses
    stream and their lengths differ much: a pool that generates cannot process the responses that are finished, and the
    predicted times leave that out.
    """
    placement = spec.placement
    # With dynamic sampling, only the reward streams.
    is_streamed = layout_of(spec).schedule.streaming and spec.algorithm.dynamic_sampling is None
    if is_streamed and statistics.median(map(evenness, steps)) < MIN_EVENNESS:
        return
    for pool in spec.pools if spec.device is Device.CUDA else ():
        pools = [*placement.rollout_pools, pool.name]
        other = spec.model_copy(update={"placement": placement.model_copy(update={"rollout": pools})})
        if next(check(other), None) is None and _has_room_for_an_engine(pool, spec, steps):
            yield pool.name, other


def _has_room_for_an_engine(pool: Pool, spec: PPOJobSpec, steps: Sequence[Mapping[str, float]]) -> bool:
    """Whether an engine fits beside the measured peak memory of the pool, without having to sleep."""
    peak, total = _memory(pool, steps)
    return peak + spec.rollout.gpu_memory_utilization * total <= total


def _memory(pool: Pool, steps: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return the most that was in use on a GPU of the pool, and its memory, in GB; 0 if they were not measured."""
    peak, total = (
        max(metrics.get(f"pool/{pool.name}/memory_{name}_gb", 0.0) for metrics in steps) for name in ("peak", "total")
    )
    return peak, total


def _with_copy(
    spec: PPOJobSpec, steps: Sequence[Mapping[str, float]], role: Role, processes: str
) -> Iterator[tuple[str, PPOJobSpec]]:
    """Yield each further pool that could have a copy of a role's model, with the spec that has it there.

    Args:
        processes: name of those that have the model.
    """
    given = spec.placement.pools_of(role)
    for pool in spec.pools if given else ():
        placement = spec.placement.model_copy(update={role.value: [*given, pool.name]})
        other = spec.model_copy(update={"placement": placement})
        allocated = max(metrics.get(f"perf/max_memory_allocated_gb/{processes}", 0.0) for metrics in steps)
        of_copy = allocated * spec.pool(given[0]).gpus / pool.gpus
        if next(check(other), None) is None and _has_room_for_a_copy(pool, of_copy, steps):
            yield pool.name, other


def _has_room_for_a_copy(pool: Pool, of_copy: float, steps: Sequence[Mapping[str, float]]) -> bool:
    """Whether a copy fits beside the measured peak memory, if all that torch allocated is divided over the GPUs."""
    peak, total = _memory(pool, steps)
    return peak + of_copy <= total or not total


_SHARED = "sharing pool {} with the rollout (placement.rollout)"
_WITH_REFERENCE = "a copy of the reference in pool {} (placement.ref)"
_WITH_REWARD_MODEL = "a copy of the reward model in pool {} (placement.reward)"


def _say_placed(changes: Mapping[str, float], words: str) -> Iterator[str]:
    """Yield the sentence about the pool that would save most, if it saves enough."""
    best = min(changes, key=lambda name: changes[name], default=None)
    if best is not None and changes[best] <= -MIN_GAIN:
        yield f"{words.format(best)} would save {-changes[best]:.0%} step time"


_FORWARD: Final = (Phase.OLD_LOG_PROB, Phase.VALUES, Phase.REF)


def _say_streamed(spec: PPOJobSpec, steps: Sequence[Mapping[str, float]], step: float) -> Iterator[str]:
    """Yield the sentence about a reward function that could score responses while others are generated.

    In one pool, `Auto` leaves that out, because it makes a step with a fast function slower (docs/measured.md).
    """
    is_left_out = (
        spec.schedule.mode is ScheduleMode.OVERLAPPED and set(spec.schedule.disabled_overlaps) >= ONLY_BETWEEN_POOLS
    )
    saved = statistics.median(map(_saved_by_streaming, steps)) / step
    if is_left_out and spec.reward.uses_function and saved >= MIN_GAIN:
        yield (
            "scoring responses while others are generated (schedule: {mode: Overlapped, disabledOverlaps: "
            f"[NextGeneration]}}) would save {saved:.0%} step time"
        )


def _saved_by_streaming(metrics: Mapping[str, float]) -> float:
    """Return the seconds of the reward that would pass while responses are generated, and do not pass with log-probs.

    On average, a response is ready before the longest one by the difference of their lengths.
    """

    def seconds(phase: str) -> float:
        return metrics.get(f"timing_s/{phase}", 0.0)

    left = seconds(Phase.REWARD) - sum(map(seconds, _FORWARD))
    return min((1 - evenness(metrics)) * seconds(Phase.GENERATE), left)


def _cheapest(options: Sequence[_Option], gpus: int) -> _Option | None:
    """Return the option with the fewest GPUs whose cost is small enough."""
    cheap = [o for o in options if o.change <= min(MAX_COST, (gpus - o.gpus) / gpus / 3)]
    return min(cheap, key=lambda option: (option.gpus, option.change), default=None)


def _fastest(options: Sequence[_Option]) -> _Option | None:
    best = min(options, key=lambda option: option.change, default=None)
    return best if best is not None and best.change <= -MIN_GAIN else None


def _fit_memory(pools: Sequence[Pool], spec: PPOJobSpec, layout: Layout, steps: Sequence[Mapping[str, float]]) -> bool:
    """Whether the roles fit into pools that shrink, if all memory that torch allocated is divided over fewer GPUs.

    This overestimates the need, because activations are not divided. So every recommended layout can run.
    """
    for pool, old in zip(pools, spec.pools, strict=True):
        total = max(metrics.get(f"pool/{pool.name}/memory_total_gb", 0.0) for metrics in steps)
        if pool.gpus >= old.gpus or not total:
            continue
        peak = max(metrics.get(f"pool/{pool.name}/memory_peak_gb", 0.0) for metrics in steps)
        roles = [role for role, name in layout.pool_of.items() if name == pool.name]
        allocated = sum(max(m.get(f"perf/max_memory_allocated_gb/{role}", 0.0) for m in steps) for role in roles)
        if peak + allocated * (old.gpus / pool.gpus - 1) > total:
            return False
    return True


def _busy(steps: Sequence[Mapping[str, float]], pool: str) -> float:
    return sum(metrics.get(f"pool/{pool}/busy_fraction", 0.0) for metrics in steps) / len(steps)


@dataclass(frozen=True)
class _Words:
    """The facts about the current layout that the sentences use."""

    pools: Sequence[Pool]
    noun: str
    busy: Mapping[str, float]
    num_steps: int

    def changed(self, option: _Option) -> list[tuple[str, int, int]]:
        """Return (name, current GPUs, new GPUs) of the pools that change."""
        both = zip(self.pools, option.pools, strict=True)
        return [(old.name, old.gpus, new.gpus) for old, new in both if old.gpus != new.gpus]

    def number(self, number: int) -> str:
        return f"{number} {self.noun}{'' if number == 1 else 's'}"


_Say = Callable[[_Words, _Option], str]


def _say_fewer(words: _Words, option: _Option) -> str:
    ((name, old, new),) = words.changed(option)
    cost = f"{max(0.0, option.change):.0%}"
    return (
        f"pool {name} was {words.busy[name]:.0%} busy over the last {words.num_steps} steps: "
        f"{words.number(new)} instead of {old} would cost {'no' if cost == '0%' else cost} step time"
    )


def _say_more(words: _Words, option: _Option) -> str:
    ((name, old, new),) = words.changed(option)
    return f"{words.number(new - old)} more in pool {name} would save {-option.change:.0%} step time"


def _say_moved(words: _Words, option: _Option) -> str:
    (giver, number), (taker, _) = sorted(((name, old - new) for name, old, new in words.changed(option)), key=_given)
    return f"{words.number(number)} of pool {giver} in pool {taker} instead would save {-option.change:.0%} step time"


def _given(change: tuple[str, int]) -> int:
    return -change[1]
