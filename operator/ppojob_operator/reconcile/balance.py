"""Policy: autoBalance. The trainer advises other sizes of the pools, and the operator takes the best that is allowed.

What it takes is written into `status.effectivePools` and nothing more: `reading` lays it over the spec, and from there
it is another layout like any other, which `stopping` brings into force. An attempt is left alone for an interval, so
that what was advised for the one before is never applied to it.
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
    """Pools to move, and the Event that says why."""

    pools: tuple[EffectivePool, ...]
    event: EventRecord


def judge(situation: Situation) -> Move | None:
    """Return what to move of an attempt that goes on as it is; None: nothing."""
    spec, since = situation.desired, situation.submitted_at
    if spec is None or not spec.auto_balance.enabled or since is None or situation.reported_at is None:
        return None
    if spec.run_policy.queue_name is not None:
        # Other pods are another RayCluster, which would wait at the end of the queue.
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
    words = f"autoBalance moves pools ({changes}): the step is predicted to take {advice.step_time_percent:+d} % time"
    reason = situation.status.recommendation
    message = f"{words}; the trainer says: {reason}" if reason else words
    return Move(kept, EventRecord(Reason.REBALANCED, message, is_warning=False, action=Condition.LAYOUT_APPLIED))


def _best(spec: PPOJobSpec, own: Mapping[str, int], advice: list[LayoutAdvice]) -> LayoutAdvice | None:
    """Return the advice that saves most time, and of those that save none the one with the fewest GPUs."""
    allowed = (each for each in advice if _is_allowed(spec, own, each))
    return min(allowed, key=lambda each: (min(0, each.step_time_percent), each.gpus), default=None)


def _has_room(situation: Situation, advice: LayoutAdvice) -> bool:
    """Return whether the advice may be tried. Where there was no room for more, more is not asked for again.

    That holds until the job is stopped for another reason: by an edit of its layout, a suspension or a pre-emption.
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
    """`own` is what the spec itself gives the pool."""
    return nodes == pool.nodes or (pool.min_nodes or own) <= nodes <= (pool.max_nodes or own)


def _nodes(advice: LayoutAdvice) -> Mapping[str, int]:
    return {pool.name: pool.nodes for pool in advice.pools}
