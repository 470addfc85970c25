"""Policy: by which layout does the job run, and does its spec want another?

`decide` and `ray_dashboard` call it. A layout is in force from when its RayCluster is made until that is given up, and
`status.effectiveLayout` remembers it. Where the edited spec cannot be run, the job stays with the layout that it has.
"""

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.layout import differences, layout_of
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests import naming
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.plan import Job, Manifest
from ppojob_operator.reconcile.situation import Finding, Situation


def spec_in_force(job: Job) -> PPOJobSpec | None:
    """Return the spec by which the current attempt runs, or would begin; None: there is none that can be run."""
    if isinstance(job.spec, PPOJobSpec) and job.status.ray_cluster is None:
        return job.spec
    return job.effective or (job.spec if isinstance(job.spec, PPOJobSpec) else None)


def change(situation: Situation) -> str:
    """Return in words what the spec wants otherwise than it is; empty: nothing, or it cannot be run."""
    if situation.desired is None or situation.desired is situation.spec:
        return ""
    return "; ".join(differences(layout_of(situation.spec), layout_of(situation.desired)))


def needs_other_pods(situation: Situation) -> bool:
    """Return whether the layout that is desired has other pods, rather than other sizes on the same ones."""
    if situation.desired is None:
        return False
    job, name = situation.job, situation.cluster_name
    old, new = (ray_cluster(spec, job.key, job.uid, name) for spec in (situation.spec, situation.desired))
    return old != new


def is_stop_due(situation: Situation) -> bool:
    """Return whether a trainer that runs is to be stopped for a layout with other pods, and was not asked yet."""
    runs = situation.submitted_at is not None and situation.open_stop is None
    return runs and bool(change(situation)) and needs_other_pods(situation)


def next_cluster(situation: Situation, desired: PPOJobSpec) -> Manifest:
    """Return the RayCluster that the next attempt would get."""
    job = situation.job
    secret = situation.observed.surroundings.dashboard_key
    name = naming.cluster_name(job.key.name, job.uid, situation.attempt + 1, secret)
    return ray_cluster(desired, job.key, job.uid, name)


def finding(situation: Situation) -> Finding | None:
    """Return the condition LayoutApplied of a job that goes on as it is; None: there was never anything to say."""
    if situation.refusal:
        message = f"the job goes on with the layout in status.effectiveLayout, because of {situation.refusal}"
        return Finding("False", Reason.INVALID_SPEC, message)
    if situation.condition(Condition.LAYOUT_APPLIED) is None or change(situation):
        return None
    return Finding("True", Reason.LAYOUT_APPLIED, "the layout of the spec is in force")
