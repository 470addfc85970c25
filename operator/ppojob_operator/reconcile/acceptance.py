"""Policy: may this job be run at all? Until it may, nothing is created for it and no deadline runs.

`decide` asks it at each look, and the admission webhook asks `spec_problem` before there is anything to look at.
"""

from collections.abc import Iterable

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.doubts import doubts
from ppojob_api.v1alpha1.sources import has_addresses
from ppojob_api.v1alpha1.spec import PPOJobSpec
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
            "the cluster does not know ray.io/v1 RayCluster: install the KubeRay operator; "
            "this job goes on as soon as it is there"
        )
        return Finding("Unknown", Reason.KUBERAY_MISSING, message)
    if was_accepted(job):
        return _still_accepted(job) or _accepted(job.spec, doubts(job.spec))
    if job.spec.run_policy.queue_name is not None and observed.workloads is None:
        message = (
            f"spec.runPolicy.queueName: {job.spec.run_policy.queue_name!r}: the cluster does not know kueue.x-k8s.io "
            "Workload: install Kueue, or create the job without a queue; this one goes on as soon as Kueue is there"
        )
        return Finding("Unknown", Reason.KUEUE_MISSING, message)
    return _storage(job.spec, job, observed)


def was_accepted(job: Job) -> bool:
    """Return whether the job has begun: what it needs was there, and in a queue its RayCluster waits already."""
    return job.status.start_time is not None or job.status.ray_cluster is not None


def spec_problem(job: Job) -> SpecError | None:
    """Return why a spec can never be run, whatever else there is in the cluster; None: it can."""
    if isinstance(job.spec, SpecError):
        return job.spec
    problems = tuple(template_problems(job.spec, job.key, job.uid))
    return SpecError(problems) if problems else None


def _of_newer_definition(job: Job, problem: SpecError) -> Finding | None:
    """Return what is said of a job that began under a newer operator, and has fields that this one does not know.

    Only a newer definition lets the API server store them, perhaps as defaults: nothing is wrong with the job.
    """
    unknown = [error.path for error in problem.errors if error.message == UNKNOWN_FIELD]
    if not unknown or not was_accepted(job):
        return None
    message = (
        f"this operator is older than the definition of PPOJob in the cluster and does not know {', '.join(unknown)}: "
        "upgrade the operator; until then it leaves the job as it is, and a trainer that runs goes on"
    )
    return Finding("Unknown", Reason.OPERATOR_TOO_OLD, message)


RUNS_ON = Finding("True", Reason.VALID, "the job goes on; of the spec as it stands LayoutApplied speaks")
"""What is said of a job that was accepted, and whose layout was edited into one that cannot be run."""


def _accepted(spec: PPOJobSpec, doubtful: Iterable[FieldError]) -> Finding:
    words = "; ".join(map(str, doubtful))
    fetched = "what it names by address is fetched next, and " if has_addresses(spec) else ""
    message = f"the spec is valid and its claim is there; {fetched}the trainer checks the paths when it starts"
    return Finding("True", Reason.VALID, f"{message}; doubtful: {words}" if words else message)


def _still_accepted(job: Job) -> Finding | None:
    """Return what was said of the same spec at its admission: of the claim, which is not read any more, too."""
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
    return _accepted(spec, (*doubts(spec), *verdict.doubts))
