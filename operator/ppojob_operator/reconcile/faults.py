"""Condition Progressing of a job that a defect of the operator prevents from being reconciled.

`loop.py` calls it after an unexpected exception. It does not read the job's spec, which may have triggered the defect.
"""

from datetime import datetime

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.plan import Job, Plan
from ppojob_operator.reconcile import conditions, phase
from ppojob_operator.reconcile.situation import Finding
from ppojob_operator.reconcile.status import owned

_MAX_WORDS = 500


def show_fault(job: Job, error: Exception, now: datetime) -> Plan:
    """Return the plan that sets condition Progressing to Unknown, with an Event if this is new."""
    words = f"{type(error).__name__}: {error}"[:_MAX_WORDS]
    message = (
        f"a defect of the operator prevents the reconcile of this job ({words}): report it with the operator's log. "
        "A running trainer continues; the operator retries"
    )
    old = job.status
    merged = conditions.merge(
        old.conditions,
        {Condition.PROGRESSING: Finding("Unknown", Reason.OPERATOR_FAULT, message)},
        job.generation,
        now,
    )
    status = old.model_copy(update={"conditions": merged, "phase": phase.derive(merged, old.attempt or 0)})
    desired = owned(status)
    return Plan(
        status=None if desired == owned(old) else desired, events=tuple(conditions.events(old.conditions, merged))
    )
