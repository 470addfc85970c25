"""Policy: which layout is in force, does the spec request another, and which one does autoBalance choose?

A layout is in force from the creation of its RayCluster until that is released; `status.effectiveLayout` has it. If an
edited spec is invalid, the job keeps its layout. Condition LayoutApplied says which it is.

autoBalance: the trainer recommends pool sizes, and the operator applies the best allowed ones. It only writes
`status.effectivePools`. `reading.py` merges them into the spec, and the new layout is then applied like any other. A
recommendation for an earlier attempt is never applied, because an attempt is resized only after its interval.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.layout import differences, layout_of
from ppojob_api.v1alpha1.pools import Pool
from ppojob_api.v1alpha1.reported import LayoutAdvice
from ppojob_api.v1alpha1.rules import check
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import EffectivePool
from ppojob_operator.manifests import naming, own_fields
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.plan import EventRecord, Job, Manifest, Observed
from ppojob_operator.reading import with_nodes
from ppojob_operator.reconcile.situation import Finding, Situation

_CONTINUES = "the job continues with the layout in status.effectiveLayout, because of "


def spec_in_force(job: Job) -> PPOJobSpec | None:
    """Return the spec with the layout of the current attempt; None: there is no valid one."""
    if isinstance(job.spec, PPOJobSpec) and job.status.ray_cluster is None:
        return job.spec
    return job.effective or (job.spec if isinstance(job.spec, PPOJobSpec) else None)


def with_own_fields(job: Job, observed: Observed) -> Observed:
    """Return what was observed, with the user's fields in the API server's words about merged pods."""
    spec = spec_in_force(job)
    words, error = observed.dry_run, observed.last_error
    if words and isinstance(job.spec, PPOJobSpec):
        words = own_fields.with_own_fields(words, job.spec, job.key, job.uid)
    if error and spec is not None:
        error = own_fields.with_own_fields(error, spec, job.key, job.uid)
    return replace(observed, dry_run=words, last_error=error) if words or error else observed


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


def is_trial_due(situation: Situation, *, is_over: bool) -> bool:
    """Return whether the API server must try the layout of the spec.

    That is due before a running trainer is stopped for it, when it is edited during a stop, and before the next attempt
    gets it: a stop takes minutes, in which a class may be deleted. A suspended job needs none.

    is_over: the trainer has ended, or its grace period is over.
    """
    if situation.open_stop is None:
        return is_stop_due(situation)
    if situation.spec.run_policy.suspend or not change(situation) or not needs_other_pods(situation):
        return False
    applied = situation.condition(Condition.LAYOUT_APPLIED)
    is_tried = applied is not None and applied.observed_generation == situation.job.generation
    return is_over or not is_tried or (applied is not None and applied.status == "Unknown")


def next_cluster(situation: Situation) -> Manifest:
    """Return the RayCluster of the next attempt."""
    job, desired = situation.job, situation.desired
    assert desired is not None
    secret = situation.observed.surroundings.dashboard_key
    name = naming.cluster_name(job.key.name, job.uid, situation.attempt + 1, secret)
    return ray_cluster(desired, job.key, job.uid, name, [node.name for node in situation.status.avoided_nodes])


def kept_refusal(job: Job) -> str:
    """Return why the API server refused the spec's layout when the trainer ran; empty: it did not.

    The next attempt has the layout in force then, as after an edit that the rules refuse. When its trainer runs, the
    spec's layout is tried again.
    """
    if job.effective is None or job.effective is job.spec:
        return ""
    found = next((each for each in job.status.conditions if each.type == Condition.LAYOUT_APPLIED), None)
    if found is None or found.reason != Reason.INVALID_SPEC or found.observed_generation != job.generation:
        return ""
    return found.message.removeprefix(_CONTINUES)


def layout_applied(situation: Situation, pools_ready: Finding) -> Finding | None:
    """Return condition LayoutApplied of a job that is not being stopped; None: its layout was never edited.

    pools_ready: condition PoolsReady.
    """
    refusal = situation.refusal
    if refusal and situation.observed.is_dry_run_unanswered:
        known = kept_refusal(situation.job)
        if not known:
            message = f"{_CONTINUES}{refusal}. The operator tries the layout of the spec again"
            return Finding("Unknown", Reason.API_REQUEST_FAILED, message)
        refusal = known
    if refusal:
        return Finding("False", Reason.INVALID_SPEC, f"{_CONTINUES}{refusal}")
    if situation.condition(Condition.LAYOUT_APPLIED) is None or change(situation):
        return None
    if pools_ready.reason == Reason.CLUSTER_REFUSED:
        return Finding("False", Reason.CLUSTER_REFUSED, "condition PoolsReady says why this layout has no RayCluster")
    return Finding("True", Reason.LAYOUT_APPLIED, "the layout of the spec is in force")


@dataclass(frozen=True)
class Move:
    """Pools to resize, and the Event that says why."""

    pools: tuple[EffectivePool, ...]
    event: EventRecord


def rebalance(situation: Situation) -> Move | None:
    """Return the pools to resize while an attempt runs; None: none."""
    spec, since = situation.desired, situation.submitted_at
    if spec is None or not spec.auto_balance.enabled or since is None or situation.reported_at is None:
        return None
    if spec.run_policy.queue_name is not None:
        # New sizes need a new RayCluster, which would wait at the end of the queue.
        return None
    if situation.now - since < timedelta(minutes=spec.auto_balance.interval_minutes):
        return None
    own = {pool.name: pool.spec_nodes for pool in situation.job.moved}
    advice = _best(spec, own, [each for each in situation.status.layout_advice if _has_room(situation, each)])
    if advice is None:
        return None
    nodes = _nodes(advice)
    pools = [EffectivePool(name=p.name, nodes=nodes[p.name], spec_nodes=own.get(p.name, p.nodes)) for p in spec.pools]
    kept = tuple(pool for pool in pools if pool.nodes != pool.spec_nodes)
    changes = ", ".join(f"{p.name}: nodes {p.nodes} -> {nodes[p.name]}" for p in spec.pools if p.nodes != nodes[p.name])
    words = f"autoBalance resizes pools ({changes}): the step is predicted to take {advice.step_time_percent:+d} % time"
    reason = situation.status.recommendation
    message = f"{words}; the trainer reports: {reason}" if reason else words
    return Move(kept, EventRecord(Reason.REBALANCED, message, is_warning=False, action=Condition.LAYOUT_APPLIED))


def _best(spec: PPOJobSpec, own: Mapping[str, int], advice: list[LayoutAdvice]) -> LayoutAdvice | None:
    """Return the recommendation that saves most time, or if none saves time, the one with the fewest GPUs."""
    allowed = (each for each in advice if _is_allowed(spec, own, each))
    return min(allowed, key=lambda each: (min(0, each.step_time_percent), each.gpus), default=None)


def _has_room(situation: Situation, advice: LayoutAdvice) -> bool:
    """Return whether the cluster may have capacity. After a resize that could not start, pools are not enlarged.

    That holds until the job is stopped for another reason: an edit of its layout, a suspension or a pre-emption.
    """
    stop, nodes = situation.status.stop, _nodes(advice)
    if stop is None or stop.reason != Reason.STARTUP_DELAYED:
        return True
    return all(nodes.get(pool.name, pool.nodes) <= pool.nodes for pool in situation.spec.pools)


def _is_allowed(spec: PPOJobSpec, own: Mapping[str, int], advice: LayoutAdvice) -> bool:
    nodes = _nodes(advice)
    sizes = {pool.name: pool.gpus_per_node for pool in advice.pools}
    if sizes != {pool.name: pool.gpus_per_node for pool in spec.pools}:
        return False
    is_within = all(_is_within(pool, own.get(pool.name, pool.nodes), nodes[pool.name]) for pool in spec.pools)
    is_other = any(pool.nodes != nodes[pool.name] for pool in spec.pools)
    return is_within and is_other and not any(check(with_nodes(spec, nodes)))


def _is_within(pool: Pool, own: int, nodes: int) -> bool:
    """Return whether `nodes` is within the pool's bounds. `own` is the number of nodes in the spec."""
    return nodes == pool.nodes or (pool.min_nodes or own) <= nodes <= (pool.max_nodes or own)


def _nodes(advice: LayoutAdvice) -> Mapping[str, int]:
    return {pool.name: pool.nodes for pool in advice.pools}
