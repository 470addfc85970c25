"""Policy: has the job finished? Sets condition Complete."""

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_operator.plan import RayState
from ppojob_operator.reconcile.situation import Finding, Situation


def is_finished(status: PPOJobStatus) -> bool:
    """Return whether the job is Complete or Failed. Such a job never starts again."""
    over = (Condition.COMPLETE, Condition.FAILED)
    return any(condition.type in over and condition.status == "True" for condition in status.conditions)


def judge(situation: Situation) -> Finding | None:
    """Return condition Complete if the trainer succeeded, else None."""
    ray_job = situation.ray_job
    if ray_job is None or ray_job.state is not RayState.SUCCEEDED:
        return None
    return Finding("True", Reason.TRAINER_SUCCEEDED, "the trainer completed; see status.model and the storage")
