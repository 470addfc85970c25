"""Bytes that come from other hosts: what of a rank's collectives crosses the network between hosts. Pure.

Called by `fake_device`, for each collective of a rank's pass. The ranks of a host are consecutive. Collectives are
those of NCCL's rings: of a gather or reduction over n ranks, (n - 1) / n of its bytes enter each host once, whatever
number of the ranks the host has, and they share them. What is exchanged or sent comes from where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["from_other_hosts"]


def from_other_hosts(
    operation: str, size: float, ranks: Sequence[int], rank: int, per_host: int, source: int | None = None
) -> float:
    """Return the bytes of a collective that a rank's host receives from other hosts, divided by its ranks there.

    Args:
        operation: the name of torch's operation.
        size: bytes of the result of a gather, exchange or message, or of what is reduced.
        ranks: of the group, by their numbers in the world.
        rank: one of them.
        per_host: ranks of a host.
        source: which of the group's ranks sends a message, by its place in the group.
    """
    host = rank // per_host
    local, number = sum(other // per_host == host for other in ranks), len(ranks)
    if local == number:
        return 0.0
    if source is not None:
        return size if ranks[source] // per_host != host else 0.0
    in_a_ring = size * (number - 1) / number / local
    if "all_to_all" in operation or "alltoall" in operation:
        return size * (number - local) / number
    if "allreduce" in operation or "all_reduce" in operation:
        # A ring reduces first, and then gathers.
        return 2 * in_a_ring
    return in_a_ring
