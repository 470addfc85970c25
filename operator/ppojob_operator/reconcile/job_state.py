"""The state of a job for the metrics: its status as numbers. Pure; `loop.py` calls it after each reconcile.

It has no policy: the conditions already say whether a job has stalled or failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ppojob_api.v1alpha1.constants import Condition, Phase
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import ConditionStatus, PPOJobStatus, Progress
from ppojob_operator.plan import Job, Manifest
from ppojob_operator.reconcile.reading import parse_time

WAITING = (Phase.PENDING, Phase.QUEUED, Phase.STARTING, Phase.RESTARTING)
"""Phases of a job that waits for its trainer. A download is no such wait: it may take hours, and nothing is wrong."""
FINISHED = (Phase.SUCCEEDED, Phase.FAILED)
_WITHOUT_PODS = (Phase.SUSPENDED, *FINISHED)


@dataclass(frozen=True)
class JobState:
    """One job; points in time are seconds since 1970."""

    phase: str
    """One of `constants.Phase`; empty before the first status."""
    ended_at: float | None = None
    """When it finished. None: it has not finished."""
    progress_ratio: float | None = None
    """Completed share of the steps, 0 to 1. None: no trainer has reported."""
    seconds_left: float | None = None
    """Estimated time to the end, while it runs. None: not known."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """Number of retries by cause: `user` or `infrastructure`."""
    gpus: Mapping[str, float] = field(default_factory=dict)
    """GPUs of all its pools: `desired`, and `ready` of them. Empty: it has no pods."""
    waiting_since: float | None = None
    """Since when it has waited for a trainer to start. None: it does not wait."""
    last_progress: float | None = None
    """When a report of the running trainer last showed progress. None: it does not run."""
    last_report: float | None = None
    """When the running trainer reported last."""
    is_stalled: bool = False
    """Whether the condition Stalled is true and the job has not finished."""
    unsaved_since: float | None = None
    """Time of the newest checkpoint, or of the last start where that is later. None: it does not run, or saves no
    checkpoints."""
    last_failure: tuple[str, float] | None = None
    """Reason and time of the last failure, of an attempt that was tried again too."""


def job_state(job: Job, written: Manifest | None) -> JobState:
    """Return the state of a job after a reconcile.

    Args:
        job: the job as it was read, with the trainer's reports.
        written: the operator's part of the status, if the reconcile wrote it.
    """
    status = job.status
    if written is not None:
        status = PPOJobStatus.model_validate({**status.to_wire(), **written}, extra="ignore")
    phase, progress = status.phase or "", status.progress
    is_running = phase == Phase.RUNNING and progress is not None
    failure, conditions = status.last_failure, {each.type: each for each in status.conditions}
    return JobState(
        phase=phase,
        ended_at=_seconds(status.completion_time) if phase in FINISHED else None,
        progress_ratio=_ratio(progress),
        seconds_left=progress.eta_seconds if is_running and progress else None,
        retries={} if status.retries is None else _by_cause(status),
        gpus={} if phase in _WITHOUT_PODS else _gpus(status),
        waiting_since=_waiting_since(conditions) if phase in WAITING else None,
        last_progress=_seconds(progress.last_change_time) if is_running and progress else None,
        last_report=_seconds(progress.last_update_time) if is_running and progress else None,
        is_stalled=phase not in FINISHED and _is_true(conditions.get(Condition.STALLED)),
        unsaved_since=_unsaved_since(job, status) if is_running else None,
        last_failure=None if failure is None else (failure.reason, parse_time(failure.time).timestamp()),
    )


def _by_cause(status: PPOJobStatus) -> dict[str, int]:
    assert status.retries is not None
    return {"user": status.retries.user, "infrastructure": status.retries.infrastructure}


def _ratio(progress: Progress | None) -> float | None:
    if progress is None or progress.total_steps <= 0:
        return None
    return min(progress.step / progress.total_steps, 1.0)


def _gpus(status: PPOJobStatus) -> dict[str, float]:
    known = [(pool.gpus or 0, pool.ready_nodes or 0, pool.desired_nodes or 0) for pool in status.pools]
    ready = sum(gpus * ready / desired for gpus, ready, desired in known if desired)
    return {"desired": sum(gpus for gpus, _, _ in known), "ready": ready}


def _waiting_since(conditions: Mapping[str, ConditionStatus]) -> float | None:
    """Return when the last trainer, suspension or fetch ended; before the first, when the job was seen."""
    kinds = (Condition.SUBMITTED, Condition.SUSPENDED, Condition.SOURCES_FETCHED)
    ended = [conditions[kind] for kind in kinds if kind in conditions]
    known = ended or [conditions[kind] for kind in (Condition.ACCEPTED,) if kind in conditions]
    return max((parse_time(each.last_transition_time).timestamp() for each in known), default=None)


def _unsaved_since(job: Job, status: PPOJobStatus) -> float | None:
    if not isinstance(job.spec, PPOJobSpec) or job.spec.checkpoint.every_steps == 0:
        return None
    times = (status.start_time, status.checkpoint.time if status.checkpoint else None)
    return max((seconds for seconds in map(_seconds, times) if seconds is not None), default=None)


def _is_true(condition: ConditionStatus | None) -> bool:
    return condition is not None and condition.status == "True"


def _seconds(time: str | None) -> float | None:
    return None if time is None else parse_time(time).timestamp()
