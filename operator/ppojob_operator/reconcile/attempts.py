"""Policy: has the current attempt failed, whom is that counted against, and why?

The trainer names its own failure in the last line of its log; where it could not, Ray's words, the pods and the exit
code must do. A pod that wanted more memory than it may have comes first: to the trainer it looks like a lost machine.
It looks at submitted attempts only.
"""

from datetime import timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.progress import FailureKind, FailureRecord
from ppojob_operator.manifests import naming
from ppojob_operator.manifests.submission import pods_digest, pods_key
from ppojob_operator.plan import ALIVE, Pod, RayJob, RayState
from ppojob_operator.reconcile.situation import Failure, Situation

_SETTLING = timedelta(seconds=30)
"""How long Ray may not yet know a job that it took, and the trainer may look for the words for a lost pod."""
_SILENCE = timedelta(seconds=120)
"""How long neither dashboard nor trainer may answer before the head counts as lost."""

_SIGKILL = (137, -9)
_USERS_ERRORS = {"JOB_ENTRYPOINT_COMMAND_ERROR", "JOB_ENTRYPOINT_COMMAND_START_ERROR", "RUNTIME_ENV_SETUP_FAILURE"}


def judge(situation: Situation) -> Failure | None:
    """Return why the attempt failed, or None: it did not, or was not sent yet."""
    if situation.submitted_at is None:
        return None
    ray_job = situation.ray_job
    if ray_job is not None and ray_job.state is RayState.FAILED:
        return _ended(situation, ray_job)
    if ray_job is not None and ray_job.state is RayState.STOPPED:
        message = "somebody stopped the trainer in Ray's dashboard"
        return Failure(FailureKind.USER, Reason.INTERRUPTED, message, ray_job.exit_code, is_cluster_suspect=False)
    loss = _lost_head(situation) or _lost_workers(situation)
    is_starved = any(pod.trouble is not None and pod.trouble == pod.out_of_memory for pod in _all_pods(situation))
    return (_starved(situation) or loss) if (loss or is_starved) else None


def _ended(situation: Situation, ray_job: RayJob) -> Failure:
    record = FailureRecord.from_log(situation.observed.log_tail or "")
    lost = lost_pods(situation)
    if _may_come_of_a_loss(record, lost) and (starved := _starved(situation)):
        return starved
    if record is not None and (record.kind is not FailureKind.USER or not lost):
        suspect = record.kind is FailureKind.INFRASTRUCTURE and not (lost and are_lost_pods_replaced(situation))
        return Failure(record.kind, record.reason, record.message, record.exit_code, is_cluster_suspect=suspect)
    if lost:
        message, suspect = f"the trainer failed while pods were lost: {lost}", not are_lost_pods_replaced(situation)
        return Failure(FailureKind.INFRASTRUCTURE, Reason.POD_LOST, message, ray_job.exit_code, suspect)
    if ray_job.error_type not in _USERS_ERRORS:
        message = f"Ray lost the trainer: {_first_line(ray_job.message)}"
        return Failure(FailureKind.INFRASTRUCTURE, Reason.HEAD_LOST, message, ray_job.exit_code)
    if ray_job.exit_code in _SIGKILL:
        message = (
            "the trainer was killed by signal 9, most likely for want of memory on the head pod: "
            f"raise spec.head.resources.memory ({situation.spec.head.resources.memory})"
        )
        return Failure(FailureKind.USER, Reason.OUT_OF_MEMORY, message, ray_job.exit_code)
    message = f"the trainer ended without naming its failure: {_last_words(situation, ray_job)}"
    return Failure(FailureKind.USER, Reason.TRAINER_FAILED, message, ray_job.exit_code, is_cluster_suspect=False)


def _may_come_of_a_loss(record: FailureRecord | None, lost: str) -> bool:
    """Return whether the end of the trainer, as it names it, may come of the end of a pod."""
    if record is None:
        return True
    if record.kind is FailureKind.INFRASTRUCTURE:
        return record.reason != Reason.INTERRUPTED
    return record.kind is FailureKind.USER and bool(lost)


def _starved(situation: Situation) -> Failure | None:
    """Return the failure of an attempt of which a pod wanted more memory than it may have; None: no pod did."""
    killed = next(((pod, pod.out_of_memory) for pod in _all_pods(situation) if pod.out_of_memory), None)
    if killed is None:
        return None
    pod, trouble = killed
    message = f"pod {pod.name}: {trouble.words}: {_more_memory(pod, trouble.container)}"
    return Failure(FailureKind.USER, trouble.reason, message, trouble.exit_code)


def _more_memory(pod: Pod, container: str) -> str:
    where = "the head" if pod.pool is None else f"pool {pod.pool}"
    if container == naming.HEAD_CONTAINER:
        return "raise spec.head.resources.memory"
    if container == naming.WORKER_CONTAINER:
        return f"raise memory of resourcesPerGPU of {where}"
    return f"raise the memory limit of that container in podTemplate of {where}"


def _lost_head(situation: Situation) -> Failure | None:
    """Return the loss of the head, with which the attempt is gone: Ray's memory of it lives there."""
    name, since, ray = situation.cluster_name, situation.submitted_at or situation.now, situation.observed.ray
    head, cluster = situation.head, situation.cluster
    message = ""
    if cluster is None:
        message = f"the RayCluster {name} was deleted"
    elif cluster.is_suspended:
        message = f"the RayCluster {name} was suspended"
    elif head is None:
        message = "" if _is_held(situation) else f"the head pod of the RayCluster {name} is gone"
    elif head.trouble is not None:
        message = f"the head pod {head.name} failed: {head.trouble.words}"
    elif ray is not None and not ray.problem and situation.ray_job is None and situation.now - since > _SETTLING:
        message = f"Ray in the RayCluster {name} does not know the submission {situation.submission_id} any more"
    elif _is_silent(situation):
        problem = ray.problem if ray else "the head pod is not ready"
        message = f"neither Ray's dashboard nor the trainer answered for {_SILENCE.seconds} s: {problem}"
    return Failure(FailureKind.INFRASTRUCTURE, Reason.HEAD_LOST, message) if message else None


def _is_silent(situation: Situation) -> bool:
    ray = situation.observed.ray
    is_unreachable = ray is None or bool(ray.problem)
    unknown_for = situation.age_of(Condition.PROGRESSING, "Unknown")
    return is_unreachable and unknown_for > _SETTLING and not _is_reporting(situation)


def _is_reporting(situation: Situation) -> bool:
    """Return whether reports of the running attempt arrive, or it has had no time yet for the first one."""
    since = situation.reported_at or situation.submitted_at
    return since is not None and situation.now - since <= _SILENCE


def _is_held(situation: Situation) -> bool:
    """Return whether pods are leaving and a trainer that reports makes their hook hold them.

    Another attempt now would fence it out before its checkpoint.
    """
    return any(pod.is_going for pod in _all_pods(situation)) and _is_reporting(situation)


def _lost_workers(situation: Situation) -> Failure | None:
    """Return the loss of worker pods that the trainer had time to notice, and did not."""
    lost = lost_pods(situation)
    grace = timedelta(seconds=situation.spec.run_policy.stop_grace_period_seconds)
    patience = _SETTLING + grace if _is_held(situation) else _SETTLING
    if not lost or situation.age_of(Condition.POOLS_READY, "False") < patience:
        return None
    suspect = not are_lost_pods_replaced(situation)
    return Failure(FailureKind.INFRASTRUCTURE, Reason.POD_LOST, lost, is_cluster_suspect=suspect)


def are_lost_pods_replaced(situation: Situation) -> bool:
    """Return whether the RayCluster is sound but for worker pods that are gone: KubeRay makes those anew.

    A pod that the attempt began with and that is there, but not ready, may be on a node that was lost; it would be
    waited for until Kubernetes gives the node up.
    """
    head, since = situation.head, situation.submitted_at
    if head is None or not head.is_ready or since is None:
        return False
    return all(pod.is_ready or (pod.created is not None and pod.created >= since) for pod in situation.pods)


def _all_pods(situation: Situation) -> list[Pod]:
    """Return the pods of the attempt with those that are being deleted: KubeRay is quick to clear up."""
    return [pod for pod in situation.observed.pods if pod.cluster == situation.cluster_name]


def lost_pods(situation: Situation) -> str:
    """Return which pools have lost pods that the attempt began with; empty: none, or it has not begun.

    A pod that is there and only not ready is not lost while a trainer that runs reports: the kubelet may have begun
    anew, or a probe come too late under load.
    """
    if situation.submitted_at is None or situation.ray_job is None:
        return ""
    is_alive = situation.ray_job.state in ALIVE and _is_reporting(situation)
    lines = []
    for pool in situation.spec.pools:
        pods = [pod for pod in situation.pods if pod.pool == pool.name]
        kept = [pod for pod in pods if pod.is_ready or (is_alive and pod.trouble is None)]
        num_ready = sum(pod.is_ready for pod in pods)
        words = next((f" ({pod.trouble.words})" for pod in pods if pod.trouble), "")
        known = situation.ray_job.metadata.get(pods_key(pool.name))
        if len(kept) < pool.nodes:
            lines.append(f"pool {pool.name} has only {num_ready} of its {pool.nodes} pods ready{words}")
        elif known is not None and known != pods_digest(pod.name for pod in kept):
            lines.append(f"pool {pool.name} has other pods than the trainer began with")
    return "; ".join(lines)


def _last_words(situation: Situation, ray_job: RayJob) -> str:
    lines = [line.strip() for line in (situation.observed.log_tail or "").splitlines() if line.strip()]
    return lines[-1] if lines else _first_line(ray_job.message)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0] or "no reason given"
