"""Reports the transports between the processes of a job in the log and the metrics, once all are connected.

    ranks of a role            actor -> actor      NCCL's transport, or gloo
    weights                    actor -> rollout    NCCL's transport, gloo, or the memory of a shared GPU
    batches between two pools  pool -> pool        Ray's object store: shared memory on a node, TCP between nodes

Called by `main`. A slow transport is reported, not refused.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from ppojob_api.v1alpha1.pools import Pool
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.worker_groups.placement import PlacedPool

__all__ = ["Connections", "between_pools", "connection_metrics", "of_ranks", "of_weights", "report"]

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"
_SOCKET = "NET/Socket"
_NODE, _NODES = "RAY/SHM", "RAY/TCP"
_FOREIGN = re.compile(r"[^a-zA-Z0-9]+")


@dataclass(frozen=True)
class Connections:
    """One kind of traffic between processes, and its number of connections by transport.

    name: in the metrics. what: in the log. pools: the pools of the processes.
    """

    name: str
    what: str
    pools: tuple[str, ...]
    transports: Transports


def of_ranks(role: str, pool: str, sent: Sequence[Transports]) -> Connections | None:
    """Return the connections among the ranks of a role; None where there is only one."""
    if len(sent) == 1:
        return None
    return Connections(role, f"ranks of {role} in pool {pool}", (pool,), _sum(sent))


def of_weights(actor_pool: str, rollout_pools: Sequence[str], sent: Sequence[Transports]) -> Connections:
    """Return the connections that carry the weights from the actor's ranks to the rollout's engines."""
    where = f"pool{'s' if len(rollout_pools) > 1 else ''} {' and '.join(rollout_pools)}"
    what = f"weights from actor in pool {actor_pool} to rollout in {where}"
    return Connections("actor_to_rollout", what, (actor_pool, *rollout_pools), _sum(sent))


def between_pools(pools: Iterable[PlacedPool]) -> list[Connections]:
    """Return the transports of batches between the nodes of each two pools; a pair of nodes is one connection."""
    found = []
    for one, other in combinations(pools, 2):
        nodes = product(*({bundle.node_id for bundle in pool.bundles} for pool in (one, other)))
        counted = Counter(_NODE if first == second else _NODES for first, second in nodes)
        what = f"batches between pools {one.name} and {other.name}"
        found.append(Connections(f"pools/{one.name}_and_{other.name}", what, (one.name, other.name), dict(counted)))
    return found


def report(connections: Iterable[Connections], pools: Mapping[str, Pool], log_folder: object) -> None:
    """Log them, and warn where NCCL took TCP although a pool has devices for RDMA."""
    for found in connections:
        shown = ", ".join(f"{count} x {name}" for name, count in sorted(found.transports.items()))
        logger.info("%s: %s", found.what, shown)
        devices = [rdma.resource_name for name in found.pools if (rdma := pools[name].network.rdma) is not None]
        if _SOCKET in found.transports and devices:
            logger.warning(
                "%s: NCCL uses TCP, although the pods have %s: NCCL's log is in %s/*.nccl-*.log",
                found.what,
                " and ".join(dict.fromkeys(devices)),
                log_folder,
            )


def connection_metrics(connections: Iterable[Connections]) -> dict[str, float]:
    """Return `comm_transport/<name>/<transport>`: the number of connections."""
    return {
        f"comm_transport/{found.name}/{_FOREIGN.sub('_', transport)}": float(count)
        for found in connections
        for transport, count in found.transports.items()
    }


def _sum(sent: Sequence[Transports]) -> Transports:
    """Add up the connections of all processes. None at all among several processes means that NCCL logged nothing."""
    total: Counter[str] = Counter()
    for transports in sent:
        total.update(transports)
    return dict(total) or {UNKNOWN: 1}
