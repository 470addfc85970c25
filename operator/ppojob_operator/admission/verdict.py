"""Decides whether a PPOJob may be stored, with the messages that `reconcile` would write into its status. Pure.

`endpoint.py` calls `references_to_read`, reads these objects, and calls `judge`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ppojob_api.v1alpha1.fixed import fixed_changes
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.spec_warnings import spec_warnings
from ppojob_api.v1alpha1.validation import QUEUE_LABEL_PATH, FieldError, SpecError
from ppojob_operator.plan import Job, Manifest
from ppojob_operator.reading import is_accepted
from ppojob_operator.reconcile import is_finished, spec_problem, was_accepted
from ppojob_operator.reconcile.acceptance import (
    Reference,
    absence,
    is_template_missing,
    judge_references,
    named,
    template_of,
)

_TOO_LATE = "the job has ended, and a change of its spec has no effect until `kubectl ppo retry` runs it again"


@dataclass(frozen=True)
class Seen:
    """The objects that a spec names, as far as they could be read."""

    found: Mapping[Reference, Manifest | None]
    """None: the object does not exist."""
    unreadable: Mapping[Reference, str]
    """Why an object could not be read."""


@dataclass(frozen=True)
class Verdict:
    """Whether the job may be stored, and warnings for the user."""

    refusal: str
    """Empty: the job may be stored."""
    warnings: tuple[str, ...] = ()


def references_to_read(job: Job) -> list[Reference]:
    """Return the objects to read; none for an invalid spec."""
    return named(job.spec) if isinstance(job.spec, PPOJobSpec) and spec_problem(job) is None else []


def judge(job: Job, seen: Seen, before: Job | None = None) -> Verdict:
    """Return whether a job may be stored, with warnings; `before` is the stored one, for an update.

    An update is rejected only for new problems, so a job that an older operator accepted can still be suspended.
    """
    if before is not None and is_accepted(before.status) and job.queue_label != before.queue_label:
        remedy = "the queue cannot change once the job is accepted: create another PPOJob"
        return Verdict(str(FieldError(QUEUE_LABEL_PATH, job.queue_label, remedy)))
    if is_template_missing(job):
        # The same `kubectl apply` may create it a moment later; the operator checks the completed spec.
        missing = () if seen.unreadable else (absence(template_of(job), job.key.namespace),)
        return Verdict("", (*map(str, missing), *_remarks(job, seen)))
    known = _problems(before) if before is not None else []
    problems = [*_problems(job), *_fixed_changes(job, before)]
    if new := [problem for problem in problems if str(problem) not in map(str, known)]:
        return Verdict(str(SpecError(new)))
    if not isinstance(job.spec, PPOJobSpec):
        return Verdict("", (*map(str, problems), *_remarks(job, seen)))
    objects = judge_references(job.spec, job.key.namespace, seen.found)
    # The claim of a job that was accepted cannot be changed.
    refusals = () if was_accepted(job) else objects.refusals
    if refusals:
        return Verdict(str(SpecError(refusals)))
    problems_and_warnings = (*problems, *spec_warnings(job.spec), *objects.refusals, *objects.warnings)
    return Verdict("", (*map(str, problems_and_warnings), *_remarks(job, seen)))


def _problems(job: Job) -> Sequence[FieldError]:
    problem = spec_problem(job)
    return () if problem is None else problem.errors


def _fixed_changes(job: Job, before: Job | None) -> Iterator[FieldError]:
    """Yield the changes of an accepted job that the policy refuses, for a cluster without the policy."""
    if before is None or not is_accepted(before.status):
        return
    if isinstance(before.spec, PPOJobSpec) and isinstance(job.spec, PPOJobSpec):
        for path, value, remedy in fixed_changes(before.spec, job.spec):
            yield FieldError(f"spec.{path}", value, remedy)


def _remarks(job: Job, seen: Seen) -> Iterator[str]:
    if is_finished(job.status):
        yield _TOO_LATE
    for reference, problem in seen.unreadable.items():
        yield f"{reference.path}: {reference.name!r}: could not check whether it exists ({problem})"
