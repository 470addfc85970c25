"""Policy: is this job ours? Two operators on one job would write each other's status, so one has it.

    nobody's             the first operator that sees it writes itself into `status.operator`, before anything else
    ours                 it is looked after; that we have another version now is written too
    another operator's   it is left alone; taken over once that one's Lease has shown no sign of life for long enough
    ppojob.dev/operator  whom the annotation names takes the job over, and everybody else leaves it alone

Who an operator is say the namespace and the Lease of its release: they are the same over replicas, restarts and
upgrades. `adoption.py` asks for the loop, and the admission webhook asks who judges a job.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from ppojob_api.v1alpha1.constants import ANNOTATION_OPERATOR, Condition, Reason
from ppojob_api.v1alpha1.status import OperatorStatus, PPOJobStatus
from ppojob_operator.plan import EventRecord, Job, OtherLease
from ppojob_operator.reconcile.completion import is_finished

_ACTION = "Ownership"
_OWNER = re.compile(r"([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)(?:/([a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?))?")
_LEASE_DURATIONS = 2
"""How many times its own duration a Lease is waited for at the least, whatever the settings say."""


@dataclass(frozen=True)
class Adoption:
    """Whose a job is, and what is to be done about it first."""

    is_ours: bool
    status: PPOJobStatus | None = None
    """What is written before anything is done for the job. None: it says already whose the job is."""
    event: EventRecord | None = None
    """What people should know."""


class _RequestedOwner(NamedTuple):
    """The operator that the annotation names."""

    namespace: str
    lease: str | None

    def names(self, operator: OperatorStatus | None) -> bool:
        if operator is None:
            return False
        return operator.namespace == self.namespace and self.lease in (None, operator.lease)

    def __str__(self) -> str:
        return self.namespace if self.lease is None else f"{self.namespace} with the Lease {self.lease}"


def judge(job: Job, own: OperatorStatus, other: OtherLease | None, patience: float) -> Adoption:
    """Return whose a job is.

    Args:
        job: the job.
        own: who we are.
        other: the Lease of the operator that `rival` named. None: there is no rival, or we may not look at its Lease.
        patience: how long another operator's Lease must show no sign of life, in seconds.
    """
    requested, owner = _requested_owner(job), job.status.operator
    if requested is not None and not requested.names(own):
        words = f"the annotation {ANNOTATION_OPERATOR} gives the job to the operator in namespace {requested}"
        return Adoption(False, event=_left_alone(f"{words}; {_itself(own)} leaves it alone"))
    is_foreign = owner is not None and not is_same(owner, own)
    if owner is not None and is_foreign:
        if requested is not None and not requested.names(owner):
            return _taken_over(job, owner, own, f"the annotation {ANNOTATION_OPERATOR} asks for it")
        if other is None or other.unchanged_for < max(patience, _LEASE_DURATIONS * other.duration):
            return Adoption(False, event=_left_alone(_whose(owner, own, is_seen=other is not None)))
        silence = f"its Lease has shown no sign of life for {other.unchanged_for:.0f} s"
        return _taken_over(job, owner, own, silence)
    problem = annotation_problem(job.requested_owner)
    event = EventRecord(Reason.INVALID_ANNOTATION, problem, is_warning=True, action=_ACTION) if problem else None
    # Of a job that has ended, or is going, nobody need know whose it was.
    is_settled = owner == own or job.is_deleting or is_finished(job.status)
    return Adoption(True, None if is_settled else job.status.model_copy(update={"operator": own}), event)


def rival(job: Job, own: OperatorStatus) -> OperatorStatus | None:
    """Return the other operator upon whose life it depends whether the job is left alone; None: there is none."""
    owner = job.status.operator
    if owner is None or is_same(owner, own):
        return None
    requested = _requested_owner(job)
    return owner if requested is None or (requested.names(own) and requested.names(owner)) else None


def is_another_operators(job: Job, own: OperatorStatus) -> bool:
    """Return whether another operator runs the job, or is to."""
    requested, owner = _requested_owner(job), job.status.operator
    return not requested.names(own) if requested is not None else owner is not None and not is_same(owner, own)


def is_same(one: OperatorStatus, other: OperatorStatus) -> bool:
    """Return whether two are the same operator, of whatever version."""
    return (one.namespace, one.lease) == (other.namespace, other.lease)


def annotation_problem(requested: str | None) -> str:
    """Return what is wrong with the annotation's value; empty: nothing."""
    if requested is None or _OWNER.fullmatch(requested):
        return ""
    return (
        f"metadata.annotations[{ANNOTATION_OPERATOR}]: {requested[:100]!r}: write the namespace of the operator that "
        "should run the job, or namespace/Lease if the namespace has several operators; this value is ignored"
    )


def _requested_owner(job: Job) -> _RequestedOwner | None:
    found = _OWNER.fullmatch(job.requested_owner or "")
    return None if found is None else _RequestedOwner(found[1], found[2])


def _taken_over(job: Job, owner: OperatorStatus, own: OperatorStatus, reason: str) -> Adoption:
    """Take the job over. A RayCluster that waits for its trainer is replaced.

    The token of its dashboard is made from a key of the other operator's, and its network policy lets only that one in:
    no trainer could ever be sent there. One that has its trainer stays: the training goes on for as long as it can.
    """
    status, update = job.status, dict[str, object](operator=own)
    is_sent = any((each.type, each.status) == (Condition.SUBMITTED, "True") for each in status.conditions)
    if status.ray_cluster is not None and not is_sent and not is_finished(status):
        update |= {"ray_cluster": None, "attempt": (status.attempt or 0) + 1}
    words = f"{_itself(own)} runs the job from now on, in the place of {_name(owner)}: {reason}"
    event = EventRecord(Reason.TAKEN_OVER, words, is_warning=False, action=_ACTION)
    return Adoption(True, status.model_copy(update=update), event)


def _left_alone(words: str) -> EventRecord:
    return EventRecord(Reason.OTHER_OPERATOR, words, is_warning=True, action=_ACTION)


def _whose(owner: OperatorStatus, own: OperatorStatus, *, is_seen: bool) -> str:
    unseen = "" if is_seen else ", and may not look whether that one still runs"
    remedy = f"limit one of them by watchNamespace, uninstall it, or hand the job over ({ANNOTATION_OPERATOR})"
    return f"the job is run by {_name(owner)}; {_itself(own)} leaves it alone{unseen}: {remedy}"


def _name(operator: OperatorStatus) -> str:
    return f"the operator in namespace {operator.namespace} ({operator.lease}, version {operator.version})"


def _itself(own: OperatorStatus) -> str:
    return f"the one in {own.namespace} ({own.lease}, version {own.version})"
