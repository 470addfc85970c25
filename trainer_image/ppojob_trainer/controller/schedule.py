"""Which phases of a step run at the same time: a table with a row for each `schedule.mode`, a switch for each overlap.

Read by `ppo` and `loop`. A schedule changes when phases run and never what they compute: in all modes the same calls
get the same arguments, so the same seed gives the same numbers. (old_log_prob is the one phase that a schedule can
leave out. The update then uses the log-probs that it computes anyway.) OneStepOff is the exception: it generates with
older weights, so it is not on-policy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import DEFAULT_STALENESS, Overlap, ScheduleMode
from ppojob_trainer.controller.phases import Phase

__all__ = [
    "Schedule",
    "chain_of",
    "is_one_update",
    "is_streamed",
    "leaves_out_old_log_prob",
    "schedule_for",
    "schedule_of",
]

_NO_POOL: Final = "(no pool)"


@dataclass(frozen=True)
class Schedule:
    """What may overlap.

    values: values and reward run during old_log_prob. reference: so does ref, if it is placed.
    updates: the critic's update runs during the actor's.
    weight_sync: the weights are sent as soon as the actor's update is done, without waiting for the critic.
    next_generation: the next step's generation runs during the critic's update.
    streaming: values, ref and reward of finished responses run while others are generated, and with older weights also
    while a step is trained (`is_streamed`); with dynamic sampling only the reward, which chooses the rows.
    old_log_prob: the phase is left out if the ratio is 1 by construction.
    max_staleness: how many steps older than the trained weights those may be with which a response begins; 0:
    on-policy.
    in_flight: the engines get the weights of every step as soon as they exist, while they generate. Otherwise they get
    them when no engine generates. Only with a max_staleness above 0.
    """

    values: bool = False
    reference: bool = False
    updates: bool = False
    weight_sync: bool = False
    next_generation: bool = False
    streaming: bool = False
    old_log_prob: bool = False
    max_staleness: int = 0
    in_flight: bool = False


_SCHEDULES: Final = {
    ScheduleMode.SERIAL: Schedule(),
    ScheduleMode.PARALLEL_UPDATE: Schedule(updates=True),
    ScheduleMode.OVERLAPPED: Schedule(
        values=True,
        reference=True,
        updates=True,
        weight_sync=True,
        next_generation=True,
        streaming=True,
        old_log_prob=True,
    ),
    ScheduleMode.ONE_STEP_OFF: Schedule(
        values=True,
        reference=True,
        updates=True,
        weight_sync=True,
        next_generation=True,
        streaming=True,
        old_log_prob=True,
        max_staleness=DEFAULT_STALENESS,
    ),
}
_SWITCHED_OFF: Final[Mapping[Overlap, Mapping[str, bool]]] = {
    Overlap.VALUES: {"values": False},
    Overlap.REFERENCE: {"reference": False},
    Overlap.NEXT_GENERATION: {"next_generation": False},
    # Generation cannot start before it has its weights.
    Overlap.WEIGHT_SYNC: {"weight_sync": False, "next_generation": False},
    Overlap.STREAMING: {"streaming": False},
    Overlap.OLD_LOG_PROB: {"old_log_prob": False},
}


def schedule_of(mode: ScheduleMode, without: Collection[Overlap] = ()) -> Schedule:
    """Return the schedule of a mode with its default staleness, without the overlaps in `without`.

    Raises:
        ValueError: the mode is Auto, which `resolve` replaces.
    """
    if mode not in _SCHEDULES:
        raise ValueError(f"schedule.mode {mode} is not resolved: resolve() puts {', '.join(_SCHEDULES)} in its place")
    schedule = _SCHEDULES[mode]
    for overlap in without:
        schedule = replace(schedule, **_SWITCHED_OFF[overlap])
    return schedule


def schedule_for(spec: PPOJobSpec) -> Schedule:
    """Return the schedule of a resolved spec.

    Raises:
        ValueError: see `schedule_of`.
    """
    schedule, staleness = schedule_of(spec.schedule.mode, spec.schedule.disabled_overlaps), spec.schedule.max_staleness
    if staleness is None:
        return schedule
    return replace(schedule, max_staleness=staleness, in_flight=spec.schedule.updates_in_flight)


def chain_of(phase: str, role: str, schedule: Schedule, pool_of: Mapping[str, str]) -> str:
    """Return the chain of a forward phase, by its pool; a phase waits for the phases before it in its chain."""
    if not (schedule.reference if phase == Phase.REF else schedule.values):
        return pool_of["actor"]
    # The reward function uses no GPU, so it is in no pool's chain.
    return pool_of.get(role, _NO_POOL) if phase != Phase.REWARD else _NO_POOL


def is_streamed(chain: str, schedule: Schedule, pool_of: Mapping[str, str], writing: Collection[str]) -> bool:
    """Return whether a chain's phases may start on finished responses.

    A pool that generates computes nothing else, unless there are others that still generate when it is done. With older
    weights, log-probs and values are those of the models that the step begins with, which do not exist yet; and in a
    pool where models are updated, a phase of a later step would delay this one.

    Args:
        writing: the pools in which engines generate.
    """
    if schedule.max_staleness and chain in (pool_of["actor"], pool_of.get("critic")):
        return False
    return schedule.streaming and (chain not in writing or len(writing) > 1)


def leaves_out_old_log_prob(schedule: Schedule, *, is_one_update: bool, is_bypassed: bool) -> bool:
    """Return whether steps have no phase old_log_prob.

    Args:
        is_one_update: see the function of this name.
        is_bypassed: the engine's log-probs take the place of old_log_probs (`algorithm.rolloutCorrection`).
    """
    return is_bypassed or (schedule.old_log_prob and is_one_update)


def is_one_update(spec: PPOJobSpec) -> bool:
    """Whether each batch is used for one update, and only that update reads old_log_probs.

    Then the updated policy is the one that would compute old_log_probs, and the ratio is 1. A KL term in the reward
    reads them earlier, and so may user-defined workers.
    """
    is_whole = spec.actor.mini_batch_size == spec.data.train_batch_size and spec.algorithm.epochs == 1
    return is_whole and not spec.algorithm.kl.in_reward and not spec.workers
