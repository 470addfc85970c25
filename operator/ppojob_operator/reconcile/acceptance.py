"""Policy: can the operator run this job? Sets condition Accepted.

Until a job is accepted, nothing is created for it and no deadline runs. `decide` calls `judge` at each reconcile; the
admission webhook calls `spec_problem` before the job is stored.
"""

from collections.abc import Iterable

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.sources import has_addresses
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.spec_warnings import spec_warnings
from ppojob_api.v1alpha1.validation import UNKNOWN_FIELD, FieldError, SpecError
from ppojob_operator.manifests.ray_cluster import template_problems
from ppojob_operator.plan import Job, Observed
from ppojob_operator.reconcile import references
from ppojob_operator.reconcile.situation import Finding


def judge(job: Job, observed: Observed) -> Finding:
    """Return the condition Accepted."""
    problem = spec_problem(job)
    if problem is not None:
        return _of_newer_definition(job, problem) or Finding("False", Reason.INVALID_SPEC, str(problem))
    assert isinstance(job.spec, PPOJobSpec)
    if not observed.is_kuberay_served:
        message = (
            "the API server does not serve ray.io/v1 RayCluster: install the KubeRay operator; then this job continues"
        )
        return Finding("Unknown", Reason.KUBERAY_MISSING, message)
    if was_accepted(job):
        return _still_accepted(job) or _accepted(job.spec, spec_warnings(job.spec))
    if job.spec.run_policy.queue_name is not None and observed.workloads is None:
        message = (
            f"spec.runPolicy.queueName: {job.spec.run_policy.queue_name!r}: the API server does not serve "
            "kueue.x-k8s.io Workload: install Kueue, then this job continues, or create it without a queue"
        )
        return Finding("Unknown", Reason.KUEUE_MISSING, message)
    return _storage(job.spec, job, observed)


def was_accepted(job: Job) -> bool:
    """Return whether the job was accepted before: it has started, or its RayCluster is in a queue."""
    return job.status.start_time is not None or job.status.ray_cluster is not None


def spec_problem(job: Job) -> SpecError | None:
    """Return why the spec is invalid, independent of the cluster; None if it is valid."""
    if isinstance(job.spec, SpecError):
        return job.spec
    problems = tuple(template_problems(job.spec, job.key, job.uid))
    return SpecError(problems) if problems else None


def _of_newer_definition(job: Job, problem: SpecError) -> Finding | None:
    """Return the finding for a job of a newer operator whose spec has fields that this one does not know.

    Only a newer CRD lets the API server store them, perhaps as defaults, so the job itself is not at fault.
    """
    unknown = [error.path for error in problem.errors if error.message == UNKNOWN_FIELD]
    if not unknown or not was_accepted(job):
        return None
    message = (
        f"this operator is older than the PPOJob CRD in the cluster and does not know {', '.join(unknown)}: "
        "upgrade the operator; until then it does not change the job, and a running trainer continues"
    )
    return Finding("Unknown", Reason.OPERATOR_TOO_OLD, message)


KEEPS_LAYOUT = Finding("True", Reason.VALID, "the job continues; see condition LayoutApplied for the pending layout")
"""An accepted job whose new layout is invalid."""


def _accepted(spec: PPOJobSpec, warnings: Iterable[FieldError]) -> Finding:
    words = "; ".join(map(str, warnings))
    fetched = "what it names by address is fetched next, and " if has_addresses(spec) else ""
    message = f"the spec is valid and its claim exists; {fetched}the trainer checks the paths when it starts"
    return Finding("True", Reason.VALID, f"{message}; warnings: {words}" if words else message)


def _still_accepted(job: Job) -> Finding | None:
    """Return the finding of the acceptance of the same spec; the claim is not read again after it."""
    for condition in job.status.conditions:
        is_same = (condition.status, condition.observed_generation) == ("True", job.generation)
        if condition.type == Condition.ACCEPTED and is_same:
            return Finding("True", Reason.VALID, condition.message)
    return None


def _storage(spec: PPOJobSpec, job: Job, observed: Observed) -> Finding:
    if observed.claim is None:
        absence = references.absence(references.claim_of(spec), job.key.namespace)
        return Finding("False", Reason.STORAGE_MISSING, str(absence))
    verdict = references.judge_claim(spec, observed.claim)
    if verdict.refusals:
        reason = Reason.STORAGE_MISSING if observed.claim.phase == "Lost" else Reason.STORAGE_UNFIT
        return Finding("False", reason, str(SpecError(verdict.refusals)))
    return _accepted(spec, (*spec_warnings(spec), *verdict.warnings))
