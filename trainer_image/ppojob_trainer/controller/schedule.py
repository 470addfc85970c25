"""Which phases of a step run at the same time. One row of a table for each `schedule.mode`.

Read by `ppo` and `loop`. A schedule changes when things happen and never what is computed: in all modes the same
calls get the same arguments, so the same seed gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ppojob_api.v1alpha1.training import ScheduleMode

__all__ = ["Schedule", "schedule_of"]


@dataclass(frozen=True)
class Schedule:
    """What may overlap.

    forward: values and reward, and ref where it is placed, beside old_log_prob.
    updates: the critic's update beside the actor's; the weights then go out as soon as the actor is done.
    next_generation: the next step's generation beside the critic's update.
    """

    forward: bool
    updates: bool
    next_generation: bool


_SCHEDULES: Final = {
    ScheduleMode.SERIAL: Schedule(forward=False, updates=False, next_generation=False),
    ScheduleMode.PARALLEL_UPDATE: Schedule(forward=False, updates=True, next_generation=False),
    ScheduleMode.OVERLAPPED: Schedule(forward=True, updates=True, next_generation=True),
}


def schedule_of(mode: ScheduleMode) -> Schedule:
    """Return the schedule of a resolved spec's mode.

    Raises:
        ValueError: the mode is Auto, which `resolve` replaces.
    """
    if mode not in _SCHEDULES:
        raise ValueError(f"schedule.mode {mode} is not resolved: resolve() puts {', '.join(_SCHEDULES)} in its place")
    return _SCHEDULES[mode]
