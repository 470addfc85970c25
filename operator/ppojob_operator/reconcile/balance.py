"""Policy: autoBalance. The trainer recommends pool sizes, and the operator applies the best allowed ones.

It only writes `status.effectivePools`. `reading` merges them into the spec, and `stopping` then applies the new layout
like any other. An attempt is not resized before its interval has passed, so a recommendation for an earlier attempt is
never applied to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.pools import Pool
from ppojob_api.v1alpha1.rules import check
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import EffectivePool, LayoutAdvice
from ppojob_operator.plan import EventRecord
from ppojob_operator.reconcile.situation import Situation
from ppojob_operator.reconcile.sizes import with_nodes


@dataclass(frozen=True)
class Move:
    """Pools to resize, and the Event that says why."""

    pools: tuple[EffectivePool, ...]
    event: EventRecord


def judge(situation: Situation) -> Move | None:
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
