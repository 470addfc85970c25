"""From a report to the part of the status that the reports own, and from the object to the reply. Pure.

`intake.py` calls it. It writes no field of the operator's (status.py says who owns what): server-side apply would
take it over.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.progress import Command, FetchReport, LiveSettings, ProgressReply, ProgressReport
from ppojob_api.v1alpha1.reported import FetchStatus, Progress
from ppojob_api.v1alpha1.training import CheckpointSpec, TrainerSpec

Order = tuple[int, int]
"""Attempt and number of a report: the larger one is newer."""
NO_REPORT: Order = (-1, 0)

# What a report may not know yet, such as while the model of a new attempt is being loaded.
_KEPT_PROGRESS = ("reward", "validationReward", "firstValidationReward", "firstStepTime")
# What changes where a trainer gets on: it repeats its last report for as long as it lives, though it hangs.
_ORPHAN = "orphan"
"""Kubernetes' finalizer of an object that is deleted without those that it owns."""
_GETS_ON = ("attempt", "step", "phases", "activity")
_BRINGS_OUT = ("checkpoint", "model")
# Fields that only the trainer's reports write.
_TRAINERS = ("progress", "metrics", "checks", "checkpoint", "model", "recommendation", "layoutAdvice")


def progress_status(report: ProgressReport, job: Mapping[str, Any], now: datetime) -> dict[str, Any] | None:
    """Return the status fields of field manager `ppojob-progress`, or None where the status has a newer report.

    Reports are ordered by attempt and by their number within it, which the trainer gives: the clocks of two replicas
    may differ.

    What the report does not have keeps its previous value: server-side apply deletes a field that is left out, and a
    restarted trainer does not know the last checkpoint at first.

    Args:
        report: the report.
        job: the current PPOJob.
        now: when the report arrived, by the server's clock.
    """
    previous = job.get("status", {})
    old_progress = previous.get("progress", {})
    if order_of(report) < newest_order(job):
        return None
    kept = {name: old_progress[name] for name in _KEPT_PROGRESS if name in old_progress}
    fields: dict[str, Any] = {
        "progress": {**kept, **_progress(report, now).to_wire()},
        "metrics": _metrics(report) or list(previous.get("metrics", [])),
        "checks": None if report.checks is None else report.checks.to_wire(),
        "pools": _pools(report, job) or _busy_pools(previous.get("pools", [])),
        "sources": previous.get("sources"),
        "checkpoint": _checkpoint(report, previous.get("checkpoint", {})),
        "model": _model(report, previous.get("model", {})),
        **_recommendation(report, previous),
    }
    fields["progress"]["lastChangeTime"] = _last_change(fields, previous)
    return {name: value for name, value in fields.items() if value}


def fetch_status(report: FetchReport, pod: str, job: Mapping[str, Any], now: datetime) -> dict[str, Any] | None:
    """Return the same from a report of the fetch, or None where the status has a newer one of the same pod.

    What the trainer has reported stays: a job that was resumed may fetch again.

    Args:
        report: the report.
        pod: which pod sent it.
        job: the current PPOJob.
        now: when the report arrived, by the server's clock.
    """
    previous = job.get("status", {})
    old = previous.get("fetch", {})
    if old.get("pod") == pod and report.number <= old.get("report", 0):
        return None
    fetch = FetchStatus(
        address=report.address,
        bytes=report.bytes,
        total_bytes=report.total_bytes,
        message=report.message,
        pod=pod,
        report=report.number,
        last_update_time=format_time(now),
    )
    kept = {name: previous[name] for name in _TRAINERS if name in previous}
    fields = {
        **kept,
        "pools": _busy_pools(previous.get("pools", [])),
        "fetch": fetch.to_wire(),
        "sources": [source.to_wire() for source in report.sources],
    }
    return {name: value for name, value in fields.items() if value}


def order_of(report: ProgressReport) -> Order:
    """Return the place of a report among those of its job."""
    return report.attempt, report.number


def newest_order(job: Mapping[str, Any]) -> Order:
    """Return the place of the report that the status has. One of an attempt that never began does not count."""
    status = job.get("status", {})
    progress = status.get("progress", {})
    attempt = progress.get("attempt", -1)
    return (attempt, progress.get("report", 0)) if attempt <= status.get("attempt", 0) else NO_REPORT


def progress_reply(job: Mapping[str, Any], attempt: int, interval_seconds: int | None = None) -> ProgressReply:
    """Return the reply to the trainer: the live part of the spec, a requested checkpoint, and a requested stop.

    A stop is requested if the object is being deleted with its pods, or if `status.stop` waits for this attempt. It
    ends with a checkpoint, so no other checkpoint is requested with it.
    """
    spec = job.get("spec", {})
    # A newer definition may have fields that this operator does not know.
    trainer = TrainerSpec.model_validate(spec.get("trainer", {}), extra="ignore")
    checkpoint = CheckpointSpec.model_validate(spec.get("checkpoint", {}), extra="ignore")
    # With --cascade=orphan, the finalizer says that the pods stay.
    is_orphaned = _ORPHAN in job["metadata"].get("finalizers", [])
    is_going = job["metadata"].get("deletionTimestamp") is not None and not is_orphaned
    stop = job.get("status", {}).get("stop", {})
    is_asked = stop.get("attempt") == attempt and "completionTime" not in stop
    is_stop = is_going or is_asked
    return ProgressReply(
        command=Command.STOP if is_stop else Command.NONE,
        is_deleted=is_going or None,
        checkpoint_request=None if is_stop else _open_request(job),
        settings=LiveSettings.of(trainer, checkpoint),
        interval_seconds=interval_seconds,
    )


def format_number(value: float) -> str:
    """Return a number as people read it: whole numbers in full, others with four significant digits.

    0.41 -> "0.41", 1.0 -> "1", 12345.6 -> "12346", 0.000001 -> "1e-06".
    """
    if value == int(value) or abs(value) >= 1000:
        return str(round(value)) if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:.4g}"


def format_time(moment: datetime) -> str:
    """Return RFC 3339 in UTC, whole seconds, as metav1.Time has it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _progress(report: ProgressReport, now: datetime) -> Progress:
    percentage = 100 * report.step // report.total_steps if report.total_steps else 0
    return Progress(
        step=report.step,
        total_steps=report.total_steps,
        percentage=min(100, percentage),
        eta_seconds=None if report.eta_seconds is None else round(report.eta_seconds),
        reward=_number(report.reward),
        validation_reward=_number(report.validation_reward),
        first_validation_reward=_number(report.first_validation_reward),
        phases=report.phases,
        activity=report.activity.value,
        first_step_time=report.first_step_time,
        last_update_time=format_time(now),
        attempt=report.attempt,
        report=report.number,
        trainer_version=report.trainer_version,
    )


def _last_change(fields: Mapping[str, Any], previous: Mapping[str, Any]) -> str:
    """Return when a report last showed progress; missing reports do not count as a stall."""
    new, old = fields["progress"], previous.get("progress", {})
    is_same = all(new.get(name) == old.get(name) for name in _GETS_ON) and all(
        (fields[name] or None) == previous.get(name) for name in _BRINGS_OUT
    )
    now: str = new["lastUpdateTime"]
    return old.get("lastChangeTime", now) if is_same else now


def _checkpoint(report: ProgressReport, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Return the newest checkpoint. An answered request stays so, whatever another attempt of the trainer knows."""
    if report.checkpoint is None:
        return dict(previous)
    answered = {"request": previous["request"]} if "request" in previous else {}
    return answered | report.checkpoint.to_wire()


def _model(report: ProgressReport, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Return the newest export. Its upload keeps the previous attempt's result until this attempt has one."""
    wire = report.to_wire()
    names = {"path": "modelPath", "address": "modelAddress", "uploadFailure": "uploadFailure"}
    found = {name: wire[reported] for name, reported in names.items() if reported in wire}
    kept = {name: value for name, value in previous.items() if name != "uploadFailure" or "address" not in found}
    # The path is required: a report of an upload without it would be refused with everything else that it says.
    return kept | found if "path" in (kept | found) else {}


def _open_request(job: Mapping[str, Any]) -> str | None:
    """Return the request for a checkpoint that no checkpoint has answered; None: there is none."""
    annotations = job["metadata"].get("annotations") or {}
    request = annotations.get(constants.ANNOTATION_CHECKPOINT, "")[: constants.MAX_REQUEST_LENGTH]
    answered = job.get("status", {}).get("checkpoint", {}).get("request")
    return request if request and request != answered else None


def _number(value: float | None) -> str | None:
    return None if value is None else format_number(value)


def _metrics(report: ProgressReport) -> list[dict[str, str]]:
    """Return the metrics in the order of the fixed list; others are in the job's storage."""
    known = (name for name in constants.STATUS_METRICS if name in report.metrics)
    return [{"name": name, "value": format_number(report.metrics[name])} for name in known]


def _pools(report: ProgressReport, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how busy the job's pools are, and the engines of elastic ones.

    A pool that the job does not have is left out: it would be added to the status.
    """
    layout = job.get("status", {}).get("effectiveLayout") or job.get("spec", {})
    names = {pool["name"] for pool in layout.get("pools", [])}
    known = (pool for pool in report.pools if pool.name in names)
    return [
        {
            "name": pool.name,
            "busyFraction": format_number(pool.busy_fraction),
            **({} if pool.engines is None else {"engines": pool.engines}),
        }
        for pool in known
    ]


def _recommendation(report: ProgressReport, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recommendation of the report, which may be empty; if the report has none yet, the previous one.

    Layouts are never kept: autoBalance would apply to an attempt what was measured in another one.
    """
    wire = report.to_wire()
    known = previous if report.recommendation is None else wire
    return {"recommendation": known.get("recommendation"), "layoutAdvice": wire.get("layoutAdvice")}


def _busy_pools(pools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return our own part of the pools' status."""
    own = ("name", "busyFraction", "engines")
    return [{name: pool[name] for name in own if name in pool} for pool in pools if "busyFraction" in pool]
