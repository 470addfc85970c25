"""What is said of a PPOJob before it is stored: the same words that `reconcile` would put into its status. Pure.

`endpoint.py` calls `wanted`, looks for what comes, and calls `judge`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ppojob_api.v1alpha1.doubts import doubts
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import SpecError
from ppojob_operator.plan import Job, Manifest
from ppojob_operator.reconcile import is_finished, references, spec_problem
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


def wanted(job: Job) -> list[Reference]:
    """Return what is to be looked for; of a spec that can never be run, nothing."""
    return references.named(job.spec) if isinstance(job.spec, PPOJobSpec) and spec_problem(job) is None else []


def judge(job: Job, seen: Seen) -> Verdict:
    """Return whether a job may be stored, and what kubectl is to print."""
    problem = spec_problem(job)
    if problem is not None:
        return Verdict(str(problem))
    assert isinstance(job.spec, PPOJobSpec)
    named = references.judge(job.spec, job.key.namespace, seen.found)
    if named.refusals:
        return Verdict(str(SpecError(named.refusals)))
    return Verdict("", (*map(str, doubts(job.spec)), *map(str, named.doubts), *_remarks(job, seen)))


def _remarks(job: Job, seen: Seen) -> Iterator[str]:
    if is_finished(job.status):
        yield _TOO_LATE
    for reference, problem in seen.unseen.items():
        yield f"{reference.path}: {reference.name!r}: whether it is there could not be looked at ({problem})"
