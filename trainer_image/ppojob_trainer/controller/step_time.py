"""Computes the time of a step from the times of its phases: a simulation of `ppo` and `loop` with pools as resources.

Pure; called by `recommendation` and by the benchmark. `ppo`'s docstring draws the dependencies; a test compares this
module with the real controller in virtual time, for all modes. A pool runs one phase at a time; data and the reward
function run on CPU cores at any time. All responses are assumed to end at the same time, as if of equal length. So the
result is an upper bound: it leaves out what streaming saves within a step, and what an engine saves others that
generate at the same time. It includes what a pool takes over from another before that begins, and with OneStepOff what
streams while the step before is trained. With weight updates in flight, a push adds its time to the generation that it
interrupts. Validation, checkpoints and the critic's warm-up are left out, and a phase that was not measured takes no
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from ppojob_api.v1alpha1.workers import HookPoint
from ppojob_trainer.controller.phases import Phase
from ppojob_trainer.controller.schedule import Schedule, chain_of, is_streamed, leaves_out_old_log_prob
from ppojob_trainer.controller.shared_rows import least_rows, share

__all__ = ["Layout", "StepTime", "is_of_step", "role_of", "step_time"]

_FORWARD = (
    (Phase.REWARD, "reward"),
    (Phase.OLD_LOG_PROB, "actor"),
    (Phase.VALUES, "critic"),
    (Phase.REF, "ref"),
    (Phase.REWARD_MODEL, "reward_model"),
)
"""The phases in serial order, each with its role."""
_ROLES = {
    **dict(_FORWARD),
    Phase.DATA: "data",
    Phase.GENERATE: "rollout",
    Phase.UPDATE_CRITIC: "critic",
    Phase.UPDATE_ACTOR: "actor",
    Phase.UPDATE_WEIGHTS: "rollout",
}
_HOOK = "hook_"
# On-policy, each step starts as the one before did from the second on; a few more do no harm. With OneStepOff, the
# steps between two pushes do, but only when the slowest pool has used up the lead of the others.
_NUM_PERIODS, _NUM_STALE_PERIODS = 4, 40
_NUM_ROWS = 1024
"""Rows of a step that several pools divide among them; their number matters only for rounding."""


@dataclass(frozen=True)
class Layout:
    """Where the phases of a job run, and which of them run at the same time.

    pool_of: the pool whose GPUs a role keeps busy, without roles that run only on CPU cores. gpus: of each pool.
    hooks: the user-defined workers that are called at a point, in order. is_one_update, is_bypassed: see `schedule`.
    shared: pools that are shared with the rollout. engines_sleep: sending the weights then allocates memory in those
    pools too. copies: by phase, the pools that have its model, of phases that several pools may compute.
    """

    pool_of: Mapping[str, str]
    gpus: Mapping[str, int]
    schedule: Schedule
    hooks: Mapping[HookPoint, Sequence[str]] = field(default_factory=dict)
    is_one_update: bool = False
    is_bypassed: bool = False
    shared: Sequence[str] = ()
    engines_sleep: bool = False
    copies: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def pools_of(self, phase: str) -> list[str]:
        """Return the pools that a phase keeps busy; none if it runs on CPU cores."""
        if self.is_divided(phase):
            return list(self.copies[phase])
        pool = self.pool_of.get(role_of(phase, self.pool_of))
        is_shared_too = phase == Phase.GENERATE or (phase == Phase.UPDATE_WEIGHTS and self.engines_sleep)
        return ([] if pool is None else [pool]) + (list(self.shared) if is_shared_too else [])

    def is_divided(self, phase: str) -> bool:
        """Whether several pools compute parts of the phase."""
        return len(self.copies.get(phase, ())) > 1

    def gpus_of(self, phase: str) -> int:
        """Return the number of GPUs on which a phase runs; 1 if it runs on CPU cores."""
        return sum(self.gpus[pool] for pool in self.pools_of(phase)) or 1


@dataclass(frozen=True)
class StepTime:
    """Seconds from step to step, and the share of them in which each pool is busy.

    With OneStepOff and weights that are updated between generations, means over the steps between two pushes.
    """

    seconds: float
    busy: Mapping[str, float]


def is_of_step(phase: str) -> bool:
    """Whether each step has the phase, provided that the job has its role."""
    return phase in _ROLES or phase == Phase.ADVANTAGES or phase.startswith(_HOOK)


def role_of(phase: str, roles: Mapping[str, object]) -> str:
    """Return the role of a phase; the critic computes the advantages if `roles` has one."""
    if phase == Phase.ADVANTAGES:
        return "critic" if "critic" in roles else "actor"
    return _ROLES.get(phase, phase.removeprefix(_HOOK))


def step_time(seconds: Mapping[str, float], layout: Layout) -> StepTime:
    """Return the time from step to step.

    Args:
        seconds: of each phase of a step (`gen`, `values`, ...). A worker's `hook_<name>` covers all its hooks. Of a
            phase that several pools compute, those in which all their GPUs together compute it.
    """
    schedule, play = layout.schedule, _Simulation(seconds, layout)
    staleness = schedule.max_staleness
    push_every = 1 if schedule.in_flight else max(1, staleness)
    # Steps between a push and the push of the first step that its weights generate: long and short ones may alternate.
    period = (staleness + 1 if schedule.in_flight else 2 * staleness) or 1
    number = _NUM_STALE_PERIODS * staleness or _NUM_PERIODS
    ends = [play.step() for _ in range(number)]
    length = max((ends[-1] - ends[-1 - period]) / period, 1e-9)
    work = dict.fromkeys(layout.gpus, 0.0)
    for phase, taken in play.seconds.items():
        for pool in layout.pools_of(phase) if not layout.is_divided(phase) else ():
            work[pool] += taken / (push_every if phase == Phase.UPDATE_WEIGHTS else 1)
    # Each pool has its own part of these phases, not the mean.
    for pool, taken in play.shared.items():
        work[pool] += taken
    return StepTime(length, {pool: min(1.0, spent / length) for pool, spent in work.items()})


class _Simulation:
    """Simulates steps; every method returns its end time, in seconds from the start of the simulation."""

    def __init__(self, seconds: Mapping[str, float], layout: Layout) -> None:
        skipped = leaves_out_old_log_prob(
            layout.schedule, is_one_update=layout.is_one_update, is_bypassed=layout.is_bypassed
        )
        self.seconds = {name: s for name, s in seconds.items() if not (skipped and name == Phase.OLD_LOG_PROB)}
        self._layout = layout
        self._free: dict[str, float] = {}
        self._began = 0.0
        self._critic_done = 0.0
        self._hooks_done = 0.0
        # As in `queue`: starts and ends of the generations, the version of the weights from which they count, its push.
        self._step = 0
        self._generations: list[tuple[float, float]] = []
        self._base = 0
        self._pushed = 0.0
        # Of each pool: seconds of the last step in phases that several pools compute.
        self.shared: dict[str, float] = {}

    def step(self) -> float:
        schedule = self._layout.schedule
        self._step += 1
        ready = self._prepare(self._began)
        self._critic_done = self._run(Phase.UPDATE_CRITIC, ready)
        end = self._run(Phase.UPDATE_ACTOR, ready if schedule.updates else self._critic_done)
        if not schedule.weight_sync:
            end = max(end, self._critic_done)
        end = self._push(end)
        self._hooks_done = self._hooks(HookPoint.STEP, end)
        if not schedule.next_generation:
            end = max(end, self._critic_done, self._hooks_done)
        self._began = end
        return end

    def _prepare(self, began: float) -> float:
        """Simulate the step up to the advantages; the last step's critic and hooks must be done by then too."""
        generated = max(self._responses(began), self._hooks_done)
        generated = self._hooks(HookPoint.GENERATE, generated)
        scored = self._hooks(HookPoint.SCORE, self._forward(generated))
        return max(self._run(Phase.ADVANTAGES, scored), self._critic_done, self._hooks_done)

    def _responses(self, began: float) -> float:
        """Simulate the generations that may start by now; return when the responses of this step are there."""
        ahead = self._layout.schedule.max_staleness
        while len(self._generations) < self._base + 1 + ahead:
            ended = [end for _, end in self._generations[-1:]]
            start = self._run(Phase.DATA, max([self._pushed, *ended]) if ahead else began)
            self._generations.append((start, self._run(Phase.GENERATE, start)))
        return max(began, self._written())

    def _push(self, ready: float) -> float:
        """Simulate the transfer of the weights, unless this step has none. If it is not in flight, it waits for all
        generations."""
        schedule = self._layout.schedule
        if not schedule.in_flight and self._step - self._base < schedule.max_staleness:
            return ready
        self._base = self._step
        if schedule.in_flight:
            self._pushed = ready + self.seconds.get(Phase.UPDATE_WEIGHTS, 0.0)
            self._interrupt(ready, self._pushed)
        else:
            self._pushed = self._run(Phase.UPDATE_WEIGHTS, max([ready, *(end for _, end in self._generations)]))
        return self._pushed

    def _interrupt(self, start: float, end: float) -> None:
        """Let the generation that runs during a push pause, and those after it begin later."""
        late = 0.0
        for number, (began, ended) in enumerate(self._generations):
            if ended > start:
                began += late
                late += max(0.0, end - max(start, began))
                self._generations[number] = (began, ended + late)
        for pool in self._layout.pools_of(Phase.GENERATE):
            self._free[pool] = self._free.get(pool, 0.0) + late

    def _forward(self, generated: float) -> float:
        """Simulate the chains: of all that wait for their pools, the phase that can start first goes next."""
        chains, shared = self._chains()
        reached = {chain: self._written() if self._is_early(chain) else generated for chain in chains}
        # Parts of a phase that a chain computes in several pools at the same time, as chains that this chain waits for.
        waits_for: dict[str, str] = {}
        self.shared, end = dict.fromkeys(self._layout.gpus, 0.0), generated
        while chains:
            waiting = set(waits_for.values())
            free = {chain: phases for chain, phases in chains.items() if chain not in waiting}
            ready = {chain: self._ready(phases[0][0], reached[chain]) for chain, phases in free.items()}
            starts = {chain: (self._start(*chains[chain][0], at), at) for chain, at in ready.items()}
            first = min(starts, key=lambda chain: starts[chain])
            phase, pool = chains[first][0]
            if pool is not None:
                reached[first] = self._help(phase, pool, ready[first], shared)
            elif self._layout.is_divided(phase):
                parts = {f"{first}/{phase}/{each}": each for each in self._layout.pools_of(phase)}
                shared[phase] = _NUM_ROWS
                chains |= {first: chains[first][1:], **{part: [(phase, each)] for part, each in parts.items()}}
                reached |= dict.fromkeys(parts, ready[first])
                waits_for |= dict.fromkeys(parts, first)
            else:
                chains[first] = chains[first][1:]
                reached[first] = self._run(phase, ready[first])
            end = max(end, reached[first])
            chains = _without_done(chains, shared)
            for part in waits_for.keys() - chains.keys():
                chain = waits_for.pop(part)
                reached[chain] = max(reached[chain], reached[part])
        return end

    def _chains(self) -> tuple[dict[str, list[tuple[str, str | None]]], dict[str, int]]:
        """Return the phases of each chain, and the rows of those that several chains compute.

        A phase of which a chain computes only parts has the chain's pool, and comes last.
        """
        schedule, layout = self._layout.schedule, self._layout
        own: dict[str, list[tuple[str, str | None]]] = {}
        parts: dict[str, list[tuple[str, str | None]]] = {}
        shared: dict[str, int] = {}
        for phase, role in _FORWARD:
            if phase not in self.seconds:
                continue
            if not layout.is_divided(phase):
                own.setdefault(chain_of(phase, role, schedule, layout.pool_of), []).append((phase, None))
                continue
            pools = layout.pools_of(phase)
            chains = {pool: chain_of(phase, role, schedule, {**layout.pool_of, role: pool}) for pool in pools}
            if len(set(chains.values())) == 1:
                own.setdefault(chains[pools[0]], []).append((phase, None))
                continue
            shared[phase] = _NUM_ROWS
            for pool, chain in chains.items():
                parts.setdefault(chain, []).append((phase, pool))
        return {chain: own.get(chain, []) + parts.get(chain, []) for chain in own | parts}, shared

    def _start(self, phase: str, pool: str | None, ready: float) -> float:
        """Return when a phase could start, in its pools or in one of them."""
        if pool is None and self._layout.is_divided(phase):
            return ready
        pools = self._layout.pools_of(phase) if pool is None else [pool]
        return max([ready, *(self._free.get(each, 0.0) for each in pools)])

    def _help(self, phase: str, pool: str, ready: float, waiting: dict[str, int]) -> float:
        """Simulate the next part of a phase in one of its pools; take its rows from those that wait."""
        gpus, of_all = self._layout.gpus[pool], self._layout.gpus_of(phase)
        rows = share(waiting[phase], gpus, of_all, least_rows(_NUM_ROWS))
        waiting[phase] -= rows
        taken = self.seconds[phase] * rows / _NUM_ROWS * of_all / gpus
        self._free[pool] = self._start(phase, pool, ready) + taken
        self.shared[pool] += taken
        return self._free[pool]

    def _written(self) -> float:
        """Return the end of this step's generation, which may be before the step begins."""
        return self._generations[self._step - 1][1]

    def _is_early(self, chain: str) -> bool:
        """Whether a chain starts before the step begins, because its phases belong to models that do not change."""
        layout = self._layout
        if not layout.schedule.max_staleness or layout.hooks.get(HookPoint.GENERATE):
            return False
        return is_streamed(chain, layout.schedule, layout.pool_of, layout.pools_of(Phase.GENERATE))

    def _ready(self, phase: str, reached: float) -> float:
        return max(reached, self._critic_done) if phase == Phase.VALUES else reached

    def _hooks(self, point: HookPoint, ready: float) -> float:
        for worker in self._layout.hooks.get(point, ()):
            calls = sum(list(workers).count(worker) for workers in self._layout.hooks.values())
            ready = self._run(f"{_HOOK}{worker}", ready, share=1 / calls)
        return ready

    def _run(self, phase: str, ready: float, share: float = 1.0) -> float:
        """Simulate a phase that could start at `ready`; it waits for its pools."""
        if phase not in self.seconds:
            return ready
        taken, pools = self.seconds[phase] * share, self._layout.pools_of(phase)
        begins = {pool: max(ready, self._free.get(pool, 0.0)) for pool in pools}
        if phase == Phase.GENERATE:
            ends = _ends_of_pulled(taken, begins, self._layout.gpus)
        else:
            # Only generation starts in one pool independently of the others.
            ends = dict.fromkeys(pools, max(begins.values(), default=ready) + taken)
        self._free |= ends
        return max(ends.values(), default=ready + taken)


def _without_done(
    chains: Mapping[str, list[tuple[str, str | None]]], shared: Mapping[str, int]
) -> dict[str, list[tuple[str, str | None]]]:
    """Return the chains that have phases left, without phases of which other chains have computed the last rows."""
    left = {
        chain: [(phase, pool) for phase, pool in phases if pool is None or shared[phase]]
        for chain, phases in chains.items()
    }
    return {chain: phases for chain, phases in left.items() if phases}


def _ends_of_pulled(taken: float, begins: Mapping[str, float], gpus: Mapping[str, int]) -> dict[str, float]:
    """Return when each pool has no more to generate. A pool that is done takes over what another has not begun.

    Args:
        taken: seconds in which an engine generates an equal share of all samples.
        begins: when each pool is free.
        gpus: of each pool; its engines are proportional to them.
    """
    waiting, ends = {pool: gpus[pool] for pool in begins}, dict(begins)
    free = [(begin, pool) for pool, begin in begins.items()]
    heapify(free)
    while free:
        now, pool = heappop(free)
        ends[pool], room = now, gpus[pool]
        for other in (pool, *waiting):
            count = min(room, waiting[other])
            waiting[other], room = waiting[other] - count, room - count
        if room < gpus[pool]:
            heappush(free, (now + taken, pool))
    return ends
