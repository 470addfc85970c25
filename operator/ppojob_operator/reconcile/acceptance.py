"""Policy: may this job be run at all? Until it may, nothing is created for it and no deadline runs."""

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.validation import SpecError
from ppojob_operator.manifests.ray_cluster import template_problems
from ppojob_operator.plan import Job, Observed
from ppojob_operator.reconcile.situation import Finding


def judge(job: Job, observed: Observed) -> Finding:
    """Return the condition Accepted."""
    if isinstance(job.spec, SpecError):
        return _refused(job.spec)
    problems = tuple(template_problems(job.spec, job.key, job.uid))
    if problems:
        return _refused(SpecError(problems))
    if not observed.is_kuberay_served:
        message = (
            "the cluster does not know ray.io/v1 RayCluster: install the KubeRay operator; "
            "this job goes on as soon as it is there"
        )
        return Finding("Unknown", Reason.KUBERAY_MISSING, message)
    if job.status.start_time is None and job.spec.run_policy.queue_name is not None and observed.workloads is None:
        message = (
            f"spec.runPolicy.queueName: {job.spec.run_policy.queue_name!r}: the cluster does not know kueue.x-k8s.io "
            "Workload: install Kueue, or create the job without a queue; this one goes on as soon as Kueue is there"
        )
        return Finding("Unknown", Reason.KUEUE_MISSING, message)
    if job.status.start_time is None:
        return _storage(job.spec.storage.persistent_volume_claim, job, observed)
    return _ACCEPTED


_ACCEPTED = Finding("True", Reason.VALID, "the spec is valid and everything that it names is there")
RUNS_ON = Finding("True", Reason.VALID, "the job goes on; of the spec as it stands LayoutApplied speaks")
"""What is said of a job that was accepted, and whose layout was edited into one that cannot be run."""


def _refused(error: SpecError) -> Finding:
    return Finding("False", Reason.INVALID_SPEC, str(error))


def _storage(claim: str, job: Job, observed: Observed) -> Finding:
    where = f"spec.storage.persistentVolumeClaim: {claim!r}"
    if observed.claim is None:
        message = f"{where}: there is no such claim in namespace {job.key.namespace}: create it, or name another"
        return Finding("False", Reason.STORAGE_MISSING, message)
    if observed.claim.phase == "Lost":
        return Finding("False", Reason.STORAGE_MISSING, f"{where}: the claim has lost its volume: name another")
    return _ACCEPTED
