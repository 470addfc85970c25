"""Policy: has the current attempt failed, and why? `failure_policy.py` decides what follows.

The last line of the trainer's log names its failure. Without it, the reason comes from Ray's message, the pods and the
exit code. A pod that exceeded its memory limit takes precedence, because the trainer sees it as a lost worker. Only
submitted attempts are judged.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

from ppojob_api.v1alpha1.constants import MAX_LOG_LINE_LENGTH, MAX_LOG_LINES, Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind, FailureRecord
from ppojob_api.v1alpha1.resolve import driver_log, job_root
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Pod, RayJob, RayState, Trouble
from ppojob_operator.reconcile import pods
from ppojob_operator.reconcile.failure_policy import counted_retries
from ppojob_operator.reconcile.situation import Failure, Finding, Situation

_SETTLING = timedelta(seconds=30)
"""Time for Ray to list a job that it accepted, and for the trainer to report a lost pod itself."""

_MOST_ATTEMPTS = 10
"""Attempts in one RayCluster after which a lost process replaces it: its pods may be the cause in spite of progress."""
_SIGKILL = (137, -9)
_USERS_ERRORS = {"JOB_ENTRYPOINT_COMMAND_ERROR", "JOB_ENTRYPOINT_COMMAND_START_ERROR", "RUNTIME_ENV_SETUP_FAILURE"}
_MAX_LENGTH = 32_000


def failure_of(situation: Situation) -> Failure | None:
    """Return why the attempt failed; None: it has not failed, or was not submitted yet."""
    if situation.submitted_at is None:
        return None
    ray_job = situation.ray_job
    if ray_job is not None and ray_job.state is RayState.FAILED:
        return _ended(situation, ray_job)
    if ray_job is not None and ray_job.state is RayState.STOPPED:
        message = "somebody stopped the trainer in Ray's dashboard"
        return Failure(FailureKind.USER, Reason.INTERRUPTED, message, ray_job.exit_code, is_cluster_suspect=False)
    loss = _lost_head(situation) or _lost_workers(situation)
    is_out_of_memory = any(
        pod.trouble is not None and pod.trouble == pod.out_of_memory for pod in pods.fixed_pods(situation)
    )
    return (_out_of_memory(situation) or loss) if (loss or is_out_of_memory) else None


def _ended(situation: Situation, ray_job: RayJob) -> Failure:
    record = FailureRecord.from_log(situation.observed.log_tail or "")
    lost = pods.lost(situation)
    # The pods are fine after a loss of processes, but a second one without a newer checkpoint may be due to them.
    is_repeated = counted_retries(situation).since_progress > 0 or not situation.is_cluster_young(_MOST_ATTEMPTS)
    is_suspect = not pods.are_replaced(situation)
    if lost is None:
        is_suspect = is_repeated or record is None or not record.only_processes
    if _may_be_caused_by_a_loss(record, is_lost=lost is not None) and (out_of_memory := _out_of_memory(situation)):
        return out_of_memory
    if record is not None and (record.kind is not FailureKind.USER or lost is None):
        return _named(situation, record, lost, is_suspect=is_suspect)
    if lost is not None:
        message = f"the trainer failed while pods were lost: {lost.message}"
        return Failure(FailureKind.INFRASTRUCTURE, lost.reason, message, ray_job.exit_code, is_suspect)
    if ray_job.error_type not in _USERS_ERRORS:
        message = _with_log(situation, f"Ray lost the trainer: {_first_line(ray_job.message)}")
        return Failure(FailureKind.INFRASTRUCTURE, Reason.HEAD_LOST, message, ray_job.exit_code)
    if ray_job.exit_code in _SIGKILL:
        message = (
            "the trainer was terminated by SIGKILL, most likely because the head pod ran out of memory: "
            f"raise spec.head.resources.memory ({situation.spec.head.resources.memory})"
        )
        return Failure(FailureKind.USER, Reason.OUT_OF_MEMORY, message, ray_job.exit_code, is_repeated)
    message = f"the trainer exited without reporting a reason: {_last_line(situation, ray_job)}"
    return Failure(FailureKind.USER, Reason.TRAINER_FAILED, message, ray_job.exit_code, is_cluster_suspect=False)


def _may_be_caused_by_a_loss(record: FailureRecord | None, *, is_lost: bool) -> bool:
    """Return whether the failure that the trainer names may be the consequence of a lost pod."""
    if record is None:
        return True
    if record.kind is FailureKind.INFRASTRUCTURE:
        return record.reason != Reason.INTERRUPTED
    return record.kind is FailureKind.USER and is_lost


def _named(situation: Situation, record: FailureRecord, lost: Finding | None, *, is_suspect: bool) -> Failure:
    """Return the failure that the trainer names, or the disruption of its pods that caused it."""
    named = Failure(record.kind, record.reason, record.message, record.exit_code, is_suspect, role=record.role)
    if record.kind is not FailureKind.INFRASTRUCTURE:
        return replace(named, is_cluster_suspect=False)
    if lost is None or lost.reason == Reason.POD_LOST or situation.open_stop is not None:
        return replace(named, address=record.address)
    message = f"{lost.message}; the trainer reported {record.reason}: {record.message}"
    return replace(named, reason=lost.reason, message=message)


def _out_of_memory(situation: Situation) -> Failure | None:
    """Return the failure of an attempt with a pod that exceeded its memory limit; None: no pod did."""
    exceeded = next(((pod, pod.out_of_memory) for pod in pods.fixed_pods(situation) if pod.out_of_memory), None)
    if exceeded is None:
        return None
    pod, trouble = exceeded
    message = f"pod {pod.name}: {trouble.message}: {_more_memory(pod, trouble.container)}"
    return Failure(FailureKind.USER, trouble.reason, message, trouble.exit_code)


def _more_memory(pod: Pod, container: str) -> str:
    where = "the head" if pod.pool is None else f"pool {pod.pool}"
    if container == naming.HEAD_CONTAINER:
        return "raise spec.head.resources.memory"
    if container == naming.WORKER_CONTAINER:
        return f"raise memory of resourcesPerGPU of {where}"
    return f"raise the memory limit of that container in podTemplate of {where}"


def _lost_head(situation: Situation) -> Failure | None:
    """Return the loss of the head, which ends the attempt, because Ray's state is in the head."""
    if situation.cluster is None:
        words = _with_log(situation, f"somebody deleted the RayCluster {situation.cluster_name}")
        return Failure(FailureKind.INFRASTRUCTURE, Reason.CLUSTER_DELETED, words)
    message = f"the RayCluster {situation.cluster_name} was suspended" if situation.cluster.is_suspended else ""
    taken = None if message else pods.taken(situation)
    message = message or _lost_head_message(situation)
    if not message:
        return None
    reason, words = (taken.reason, f"{message}: {taken.message}") if taken else (Reason.HEAD_LOST, message)
    heads = (pod.trouble for pod in pods.all_pods(situation) if pod.pool is None)
    return Failure(FailureKind.INFRASTRUCTURE, reason, _with_log(situation, words), _exit_code(heads))


def _with_log(situation: Situation, words: str) -> str:
    key, spec = situation.job.key, situation.spec
    root = job_root(spec.storage.mount_path, key.namespace, key.name, situation.job.uid, spec.checkpoint.resume)
    return f"{words}; the driver's log is in the storage: {driver_log(root, situation.attempt)}"


def _lost_head_message(situation: Situation) -> str:
    name, since, ray = situation.cluster_name, situation.submitted_at or situation.now, situation.observed.ray
    head = situation.head
    if head is None:
        return "" if pods.is_held(situation) else f"the head pod of the RayCluster {name} was deleted"
    if head.trouble is not None:
        return f"the head pod {head.name} failed: {head.trouble.message}"
    if ray is not None and not ray.problem and situation.ray_job is None and situation.now - since > _SETTLING:
        return f"Ray in the RayCluster {name} does not know the submission {situation.submission_id} any more"
    if _is_silent(situation):
        problem = ray.problem if ray else "the head pod is not ready"
        return f"neither Ray's dashboard nor the trainer answered for {pods.SILENCE.seconds} s: {problem}"
    return ""


def _is_silent(situation: Situation) -> bool:
    unreachable_since = situation.unreachable_since
    is_over = unreachable_since is not None and situation.now - unreachable_since > _SETTLING
    return is_over and not pods.is_reporting(situation)


def _lost_workers(situation: Situation) -> Failure | None:
    """Return the loss of worker pods that the trainer has not reported in time."""
    # Without a head, the pods that the attempt started with are unknown.
    lost = pods.lost(situation) if situation.ray_job is not None else None
    grace = timedelta(seconds=situation.spec.run_policy.stop_grace_period_seconds)
    patience = _SETTLING + grace if pods.is_held(situation) else _SETTLING
    if lost is None or situation.age_of(Condition.POOLS_READY, "False") < patience:
        return None
    troubles = (pod.trouble for pod in pods.all_pods(situation) if pod.pool is not None)
    is_suspect = not pods.are_replaced(situation)
    return Failure(FailureKind.INFRASTRUCTURE, lost.reason, lost.message, _exit_code(troubles), is_suspect)


def _exit_code(troubles: Iterable[Trouble | None]) -> int | None:
    return next((trouble.exit_code for trouble in troubles if trouble and trouble.exit_code is not None), None)


def _last_line(situation: Situation, ray_job: RayJob) -> str:
    lines = [line.strip() for line in (situation.observed.log_tail or "").splitlines() if line.strip()]
    return lines[-1] if lines else _first_line(ray_job.message)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0] or "no reason given"


def is_log_needed(situation: Situation) -> bool:
    """Return whether the log of the current attempt can be read and was not read yet."""
    ray = situation.observed.ray
    is_there = ray is not None and not ray.problem and situation.ray_job is not None
    return is_there and situation.observed.log_tail is None


def shorten_log(log: str | None) -> str | None:
    """Return the last lines of a log, each truncated, without the oldest until the rest fits. None stays None."""
    if log is None:
        return None
    lines = [line[:MAX_LOG_LINE_LENGTH] for line in log.splitlines()[-MAX_LOG_LINES:]]
    while lines and sum(len(line) + 1 for line in lines) > _MAX_LENGTH:
        lines.pop(0)
    return "\n".join(lines) or None
