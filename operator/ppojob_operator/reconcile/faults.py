"""What is said of a job that the operator cannot reconcile because of a defect of its own.

`loop.py` calls it. It uses nothing of the job's spec, which may be what the defect is about.
"""

from datetime import datetime

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.plan import Job, Plan
from ppojob_operator.reconcile import conditions, phase
from ppojob_operator.reconcile.situation import Finding
from ppojob_operator.reconcile.status import owned

_MAX_WORDS = 500


def show_fault(job: Job, error: Exception, now: datetime) -> Plan:
    """Return the plan that says so in the condition Progressing, with an Event when it is new."""
    words = f"{type(error).__name__}: {error}"[:_MAX_WORDS]
    message = (
        f"a defect of the operator keeps it from reconciling this job ({words}): report it with the operator's log. "
        "A trainer that runs continues; the operator tries again"
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
