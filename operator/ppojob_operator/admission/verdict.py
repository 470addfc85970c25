"""What is said of a PPOJob before it is stored: the same words that `reconcile` would put into its status. Pure.

`endpoint.py` calls `wanted`, looks for what comes, and calls `judge`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.spec_warnings import spec_warnings
from ppojob_api.v1alpha1.validation import FieldError, SpecError
from ppojob_operator.plan import Job, Manifest
from ppojob_operator.reconcile import is_finished, references, spec_problem, was_accepted
from ppojob_operator.reconcile.references import Reference

_TOO_LATE = "the job has ended, and nothing comes of another spec: create another PPOJob"


@dataclass(frozen=True)
class Seen:
    """What was found of the objects that a spec names."""

    found: Mapping[Reference, Manifest | None]
    """None: there is no such object."""
    unseen: Mapping[Reference, str]
    """Why an object could not be looked for."""


@dataclass(frozen=True)
class Verdict:
    """The answer."""

    refusal: str
    """Empty: the job may be stored."""
    warnings: tuple[str, ...] = ()


def references_to_read(job: Job) -> list[Reference]:
    """Return what is to be looked for; of a spec that can never be run, nothing."""
    return references.named(job.spec) if isinstance(job.spec, PPOJobSpec) and spec_problem(job) is None else []


def judge(job: Job, seen: Seen, before: Job | None = None) -> Verdict:
    """Return whether a job may be stored, and what kubectl is to print; `before` is the one that is stored.

    An edit is refused for what it brings: a job that was taken by an older operator can still be suspended.
    """
    known = _problems(before) if before is not None else []
    problems = _problems(job)
    if new := [problem for problem in problems if str(problem) not in map(str, known)]:
        return Verdict(str(SpecError(new)))
    if not isinstance(job.spec, PPOJobSpec):
        return Verdict("", (*map(str, problems), *_remarks(job, seen)))
    named = references.judge(job.spec, job.key.namespace, seen.found)
    # The claim of a job that has begun is what it is, and cannot be changed.
    refusals = () if was_accepted(job) else named.refusals
    if refusals:
        return Verdict(str(SpecError(refusals)))
    said = (*problems, *spec_warnings(job.spec), *named.refusals, *named.warnings)
    return Verdict("", (*map(str, said), *_remarks(job, seen)))


def _problems(job: Job) -> Sequence[FieldError]:
    problem = spec_problem(job)
    return () if problem is None else problem.errors


def _remarks(job: Job, seen: Seen) -> Iterator[str]:
    if is_finished(job.status):
        yield _TOO_LATE
    for reference, problem in seen.unseen.items():
        yield f"{reference.path}: {reference.name!r}: whether it is there could not be looked at ({problem})"
