"""`status.phase`: one word for the column, derived from the conditions and from nothing else."""

from collections.abc import Sequence

from ppojob_api.v1alpha1.constants import Condition, Phase
from ppojob_api.v1alpha1.status import ConditionStatus


def derive(conditions: Sequence[ConditionStatus], attempt: int) -> str:
    """Return the phase."""
    true = {condition.type for condition in conditions if condition.status == "True"}
    if Condition.FAILED in true:
        return Phase.FAILED
    if Condition.COMPLETE in true:
        return Phase.SUCCEEDED
    if Condition.ACCEPTED not in true:
        return Phase.PENDING
    if Condition.SUBMITTED in true:
        unknown = any(c.type == Condition.PROGRESSING and c.status == "Unknown" for c in conditions)
        return Phase.RUNNING if Condition.PROGRESSING in true or unknown else Phase.STARTING
    return Phase.RESTARTING if attempt > 0 else Phase.STARTING
