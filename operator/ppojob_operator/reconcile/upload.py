"""Policy: is the exported model where `checkpoint.exportTo` says? The trainer's reports decide the condition.

An upload that failed ends no job: the model is in the storage.
"""

from ppojob_api.v1alpha1.constants import Reason
from ppojob_operator.plan import RayState
from ppojob_operator.reconcile.situation import Finding, Situation


def judge(situation: Situation) -> Finding | None:
    """Return the condition ModelUploaded; None for a job whose exports stay in the storage."""
    target, model = situation.spec.checkpoint.export_to, situation.status.model
    if target is None:
        return None
    if model is not None and model.upload_failure is not None:
        return Finding("False", model.upload_failure.reason, model.upload_failure.message)
    if model is not None and model.address is not None:
        return Finding("True", Reason.UPLOADED, f"the newest export is uploaded: {model.address}")
    ray_job = situation.ray_job
    if ray_job is not None and ray_job.state is RayState.SUCCEEDED:
        words = f"the trainer ended well, but no report of an upload to {target} arrived: see the end of its log"
        return Finding("Unknown", Reason.REPORTS_MISSING, words)
    return Finding("False", Reason.NOT_UPLOADED, f"no export is uploaded to {target} yet")
