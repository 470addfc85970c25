"""Policy: which operator owns the job? Two operators would overwrite each other's status, so each job has one.

    no owner             the first operator that sees the job writes itself into `status.operator`, before anything else
    this operator        it reconciles the job, and updates its version in the status
    another operator     the job is ignored; it is taken over if that operator's Lease is not renewed for long enough
    ppojob.dev/operator  the operator that the annotation names takes the job over; all others ignore it
    namespace not served this operator runs its accepted jobs to their end, releases its others, and ignores the rest

An operator is identified by its release's namespace and Lease, which are the same for all replicas, restarts and
upgrades. `adoption.py` calls this for the loop, and the admission webhook to validate only its own jobs. Pure.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from ppojob_api.v1alpha1.constants import ANNOTATION_OPERATOR, Condition, Reason
from ppojob_api.v1alpha1.status import OperatorStatus, PPOJobStatus
from ppojob_operator.plan import EventRecord, Job, OtherLease
from ppojob_operator.reconcile import is_finished
from ppojob_operator.reconcile.retry import is_requested
from ppojob_operator.reconcile.states import State, state_of

_ACTION = "Ownership"
_OWNER = re.compile(r"([a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)(?:/([a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?))?")
_LEASE_DURATIONS = 2
"""Minimum wait for another Lease, as a multiple of that Lease's duration. No setting lowers it."""
_NOTHING_RUNS = (State.PENDING, State.SUSPENDED)


@dataclass(frozen=True)
class Adoption:
    """Whether this operator owns a job, and what to write first."""

    is_ours: bool
    status: PPOJobStatus | None = None
    """Status to write before anything is created for the job. None: it already names the owner."""
    event: EventRecord | None = None
    """Event to emit. None: none."""


class _RequestedOwner(NamedTuple):
    """The operator in the annotation."""

    namespace: str
    lease: str | None

    def names(self, operator: OperatorStatus | None) -> bool:
        if operator is None:
            return False
        return operator.namespace == self.namespace and self.lease in (None, operator.lease)

    def __str__(self) -> str:
        return self.namespace if self.lease is None else f"{self.namespace} with the Lease {self.lease}"


def judge(job: Job, own: OperatorStatus, other: OtherLease | None, patience: float) -> Adoption:
    """Return whether this operator owns a job.

    Args:
        job: the job.
        own: the identity of this operator.
        other: the Lease of the operator that `rival` returned. None: there is no rival, or its Lease may not be read.
        patience: seconds without a renewal after which another operator's job is taken over.
    """
    requested, owner = _requested_owner(job), job.status.operator
    if requested is not None and not requested.names(own):
        words = f"the annotation {ANNOTATION_OPERATOR} assigns the job to the operator in namespace {requested}"
        return Adoption(False, event=_not_ours(f"{words}; {_itself(own)} does not reconcile it"))
    is_foreign = owner is not None and not is_same(owner, own)
    if owner is not None and is_foreign:
        if requested is not None and not requested.names(owner):
            return _take_over(job, owner, own, f"the annotation {ANNOTATION_OPERATOR} requests it")
        if other is None or other.unchanged_for < max(patience, _LEASE_DURATIONS * other.duration):
            return Adoption(False, event=_not_ours(_owned_by_another(owner, own, is_lease_readable=other is not None)))
        silence = f"its Lease has not been renewed for {other.unchanged_for:.0f} s"
        return _take_over(job, owner, own, silence)
    problem = annotation_problem(job.requested_owner)
    event = EventRecord(Reason.INVALID_ANNOTATION, problem, is_warning=True, action=_ACTION) if problem else None
    # A job that has finished or is being deleted needs no owner.
    is_settled = owner == own or job.is_deleting or is_finished(job.status)
    return Adoption(True, None if is_settled else job.status.model_copy(update={"operator": own}), event)


def may_leave(job: Job, own: OperatorStatus) -> bool:
    """Return whether this operator may stop reconciling a job whose namespace it does not serve.

    Not if it has accepted the job, which may have a RayCluster: the job runs to its end, with its retries. Nothing runs
    of a suspended job, and an ended job that should run again is a new start.
    """
    if not _is_owned(job, own):
        return True
    if job.is_deleting:
        return False
    if is_finished(job.status):
        return is_requested(job)
    return state_of(job.status) in _NOTHING_RUNS


def release(job: Job, own: OperatorStatus, rule: str) -> Adoption:
    """Return what to write about a job that `may_leave`: its owner removes itself, so that another may take the job.

    Its RayClusters are deleted before. It may have one if it was in a queue, and is not accepted any more.

    Args:
        job: the job.
        own: the identity of this operator.
        rule: the setting that excludes the job's namespace.
    """
    words = (
        f"namespace {job.key.namespace} does not match {rule} of {_name(own)}, which does not reconcile the job: label "
        "the namespace so that it matches, or create the job in a namespace that does"
    )
    if is_requested_of(job, own):
        assigned = f"the annotation {ANNOTATION_OPERATOR} assigns the job to the operator in namespace {own.namespace}"
        words = f"{assigned}, but {words}"
    event = EventRecord(Reason.NAMESPACE_NOT_SERVED, words, is_warning=True, action=_ACTION)
    if not _is_owned(job, own):
        return Adoption(False, event=event)
    update = {"operator": None, **_without_cluster(job.status)}
    return Adoption(False, job.status.model_copy(update=update), event)


def rival(job: Job, own: OperatorStatus) -> OperatorStatus | None:
    """Return the other operator whose Lease decides whether the job is taken over; None: there is none."""
    owner = job.status.operator
    if owner is None or is_same(owner, own):
        return None
    requested = _requested_owner(job)
    return owner if requested is None or (requested.names(own) and requested.names(owner)) else None


def is_another_operators(job: Job, own: OperatorStatus) -> bool:
    """Return whether another operator owns the job or is requested to."""
    requested, owner = _requested_owner(job), job.status.operator
    return not requested.names(own) if requested is not None else owner is not None and not is_same(owner, own)


def is_requested_of(job: Job, own: OperatorStatus) -> bool:
    """Return whether the annotation names this operator."""
    requested = _requested_owner(job)
    return requested is not None and requested.names(own)


def is_same(one: OperatorStatus, other: OperatorStatus) -> bool:
    """Return whether two identities are the same operator, in any version."""
    return (one.namespace, one.lease) == (other.namespace, other.lease)


def annotation_problem(requested: str | None) -> str:
    """Return what is wrong with the annotation's value; empty: it is valid."""
    if requested is None or _OWNER.fullmatch(requested):
        return ""
    return (
        f"metadata.annotations[{ANNOTATION_OPERATOR}]: {requested[:100]!r}: write the namespace of the operator that "
        "should run the job, or namespace/Lease if the namespace has several operators; this value is ignored"
    )


def _is_owned(job: Job, own: OperatorStatus) -> bool:
    return job.status.operator is not None and is_same(job.status.operator, own)


def _requested_owner(job: Job) -> _RequestedOwner | None:
    found = _OWNER.fullmatch(job.requested_owner or "")
    return None if found is None else _RequestedOwner(found[1], found[2])


def _take_over(job: Job, owner: OperatorStatus, own: OperatorStatus, reason: str) -> Adoption:
    """Take the job over. A RayCluster without a trainer is replaced.

    The token of its dashboard is derived from the other operator's key, and its NetworkPolicy admits only that one,
    so this operator could not submit a trainer. A RayCluster with a trainer is kept, so that training continues.
    """
    status, update = job.status, dict[str, object](operator=own)
    is_sent = any((each.type, each.status) == (Condition.SUBMITTED, "True") for each in status.conditions)
    if not is_sent and not is_finished(status):
        update |= _without_cluster(status)
    words = f"{_name(own)} has taken the job over from {_name(owner)}: {reason}"
    event = EventRecord(Reason.TAKEN_OVER, words, is_warning=False, action=_ACTION)
    return Adoption(True, status.model_copy(update=update), event)


def _without_cluster(status: PPOJobStatus) -> dict[str, object]:
    """Return the changes to a status without its RayCluster: another attempt's name, as its pods may still end."""
    return {} if status.ray_cluster is None else {"ray_cluster": None, "attempt": (status.attempt or 0) + 1}


def _not_ours(words: str) -> EventRecord:
    return EventRecord(Reason.OTHER_OPERATOR, words, is_warning=True, action=_ACTION)


def _owned_by_another(owner: OperatorStatus, own: OperatorStatus, *, is_lease_readable: bool) -> str:
    unseen = "" if is_lease_readable else ", and may not read the other's Lease"
    limit = "limit one of them by watchNamespaces or namespaceSelector"
    remedy = f"{limit}, uninstall it, or hand the job over ({ANNOTATION_OPERATOR})"
    return f"the job is run by {_name(owner)}; {_itself(own)} does not reconcile it{unseen}: {remedy}"


def _name(operator: OperatorStatus) -> str:
    return f"the operator in namespace {operator.namespace} ({operator.lease}, version {operator.version})"


def _itself(own: OperatorStatus) -> str:
    return f"the one in {own.namespace} ({own.lease}, version {own.version})"
