"""Policy: which layout is in force, and does the spec request another? Sets condition LayoutApplied.

`decide` and `ray_dashboard` call it. A layout is in force from the creation of its RayCluster until that is released;
`status.effectiveLayout` has it. If an edited spec is invalid, the job keeps its layout.
"""

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.layout import differences, layout_of
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests import naming
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.plan import Job, Manifest
from ppojob_operator.reconcile.situation import Finding, Situation


def spec_in_force(job: Job) -> PPOJobSpec | None:
    """Return the spec with the layout of the current attempt; None: there is no valid one."""
    if isinstance(job.spec, PPOJobSpec) and job.status.ray_cluster is None:
        return job.spec
    return job.effective or (job.spec if isinstance(job.spec, PPOJobSpec) else None)


def change(situation: Situation) -> str:
    """Return the differences between the spec and the layout in force; empty: none, or the spec is invalid."""
    if situation.desired is None or situation.desired is situation.spec:
        return ""
    return "; ".join(differences(layout_of(situation.spec), layout_of(situation.desired)))


def needs_other_pods(situation: Situation) -> bool:
    """Return whether the desired layout needs a new RayCluster. If not, its attempt can reuse the pods."""
    if situation.desired is None:
        return False
    job, name = situation.job, situation.cluster_name
    old, new = (ray_cluster(spec, job.key, job.uid, name) for spec in (situation.spec, situation.desired))
    return old != new


def is_stop_due(situation: Situation) -> bool:
    """Return whether a running trainer must be stopped for a layout with other pods, and was not asked yet."""
    runs = situation.submitted_at is not None and situation.open_stop is None
    return runs and bool(change(situation)) and needs_other_pods(situation)


def next_cluster(situation: Situation, desired: PPOJobSpec) -> Manifest:
    """Return the RayCluster of the next attempt."""
    job = situation.job
    secret = situation.observed.surroundings.dashboard_key
    name = naming.cluster_name(job.key.name, job.uid, situation.attempt + 1, secret)
    return ray_cluster(desired, job.key, job.uid, name)


def finding(situation: Situation) -> Finding | None:
    """Return condition LayoutApplied of a job that is not being stopped; None: its layout was never edited."""
    if situation.refusal:
        message = f"the job continues with the layout in status.effectiveLayout, because of {situation.refusal}"
        return Finding("False", Reason.INVALID_SPEC, message)
    if situation.condition(Condition.LAYOUT_APPLIED) is None or change(situation):
        return None
    return Finding("True", Reason.LAYOUT_APPLIED, "the layout of the spec is in force")
