"""Processes that outlive an attempt that lost others or was stopped, for the next attempt in the same Ray cluster.

Starting a process, importing its libraries, loading its model and starting vLLM take most of a restart. After a loss,
the processes that still run keep all of that; the checkpoint and the next push set their weights.

    attempt N    starts its processes with names, detached from its driver ─ a loss or a stop ─ the driver ends
    attempt N+1  finds the names ─ asks each process whether it can continue ─ keeps whole pools, ends the others

The unit is a pool, because the roles of a pool share its GPUs, and the ranks of a role cannot replace a member of their
process group. A process whose method failed is not kept: its state is unknown. Called by `run`; `Launcher` and `place`
take over what is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util import get_placement_group, list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from ppojob_api.v1alpha1.spec import PPOJobSpec

__all__ = ["NAMESPACE", "NO_SURVIVORS", "Names", "Survivors", "find_survivors", "note_logs"]

logger = logging.getLogger(__name__)

NAMESPACE = "ppojob"
"""Ray's namespace of all names here; the driver is connected to it."""

_DETACHED = "detached"
"""Ray's word for what does not end with the driver that created it."""
_PARTS, _PARTS_OF_GROUP = 6, 3
"""Of a name of a process, and of a placement group."""
_ASK_S = 60.0
"""Seconds in which a process must answer. One that computes answers when it is done; one that waits for a lost process
does not answer, and starting it again takes about as long."""


@dataclass(frozen=True)
class Names:
    """Names of processes and placement groups, which only attempts with the same spec find.

    key: identifies the spec. attempt: that started them: Ray may free a name later than the next attempt needs it.
    """

    key: str
    attempt: int

    @classmethod
    def of(cls, uid: str, spec: PPOJobSpec, attempt: int) -> Names:
        """Return the names for an attempt. After a change of the spec, no process can continue with the old one."""
        return cls(hashlib.sha256(f"{uid}\n{spec.model_dump_json()}".encode()).hexdigest()[:16], attempt)

    def of_process(self, pool: str, role: str, rank: int, number: int) -> str:
        """Return the name of a process, one of the `number` processes of its role in the pool."""
        return f"{self.key}/{pool}/{role}/{rank}/{number}/{self.attempt}"

    def of_pool(self, pool: str) -> str:
        """Return the name of a pool's placement group."""
        return f"{self.key}/{pool}/{self.attempt}"


@dataclass(frozen=True)
class Survivors:
    """The processes of an earlier attempt that continue in this one, and the names of those that may outlive this one.

    names: None: the processes end with their driver. roles: by pool, the roles whose processes can continue.
    processes: by pool and role, in the order of ranks. groups: the placement groups of these pools. logs: by role and
    rank, the file to which the process still logs.
    """

    names: Names | None = None
    roles: Mapping[str, frozenset[str]] = field(default_factory=dict)
    processes: Mapping[str, Mapping[str, Sequence[ActorHandle[Any]]]] = field(default_factory=dict)
    groups: Mapping[str, PlacementGroup] = field(default_factory=dict)
    logs: Mapping[tuple[str, int], Path] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Number of processes that continue."""
        return sum(len(found) for roles in self.processes.values() for found in roles.values())

    def of_role(self, pool: str, role: str) -> Sequence[ActorHandle[Any]]:
        """Return the processes of a role in a pool, in the order of ranks; empty: they must be started."""
        return self.processes.get(pool, {}).get(role, ())

    def actor_options(self, pool: str, role: str, rank: int, number: int) -> dict[str, str]:
        """Return Ray's options for a process that is started, one of `number` in its role and pool."""
        if self.names is None or role not in self.roles.get(pool, ()):
            return {}
        name = self.names.of_process(pool, role, rank, number)
        return {"name": name, "namespace": NAMESPACE, "lifetime": _DETACHED}

    def pool_options(self, pool: str) -> dict[str, str]:
        """Return Ray's options for a pool's placement group that is created."""
        if self.names is None or pool not in self.roles:
            return {}
        return {"name": self.names.of_pool(pool), "lifetime": _DETACHED}

    def may_continue(self, role: str) -> bool:
        """Whether the processes of a role may continue in the next attempt."""
        return any(role in roles for roles in self.roles.values())


NO_SURVIVORS = Survivors()
"""Nothing continues, neither in this attempt nor in the next one."""


async def find_survivors(names: Names, roles: Mapping[str, frozenset[str]], *, can_continue: bool) -> Survivors:
    """Return the processes that this attempt takes over, and end all others that earlier attempts have left.

    Args:
        roles: by pool, the roles whose processes can continue. A pool is kept only if it has all of them.
        can_continue: there is a checkpoint that sets their weights. False: all are ended.
    """
    found = [one for one in _listed() if can_continue and one.key == names.key and one.pool in roles]
    groups = {pool: placed[0] for pool in roles if len(placed := _placed_groups(f"{names.key}/{pool}/")) == 1}
    whole = {
        pool: of_pool
        for pool in groups
        if (of_pool := _by_role(one for one in found if one.pool == pool)).keys() >= roles[pool]
    }
    answers: list[dict[tuple[str, int], Path] | None]
    answers = await asyncio.gather(*(_renewed(pool, of_pool, names.attempt) for pool, of_pool in whole.items()))
    logs = {pool: of_pool for pool, of_pool in zip(whole, answers, strict=True) if of_pool is not None}
    survivors = Survivors(
        names,
        roles,
        {pool: {role: [one.process for one in ones] for role, ones in whole[pool].items()} for pool in logs},
        {pool: get_placement_group(groups[pool]) for pool in logs},
        {which: path for of_pool in logs.values() for which, path in of_pool.items()},
    )
    ended = [one for one in _listed() if one.key != names.key or one.pool not in logs]
    for one in ended:
        ray.kill(one.process)
    _remove_groups(except_for={groups[pool] for pool in logs})
    if ended or logs:
        text = "of an earlier attempt, %d processes continue (pools: %s), and %d are ended"
        logger.info(text, survivors.number, ", ".join(logs) or "none", len(ended))
    return survivors


def note_logs(logs: Mapping[tuple[str, int], Path], folder: Path) -> None:
    """Write into an attempt's folder of logs where the processes that continue write theirs."""
    for (role, rank), log in logs.items():
        (folder / f"{role}-{rank}.log").write_text(f"this process is of an earlier attempt and logs to {log}\n")


@dataclass(frozen=True)
class _Listed:
    """A process that has a name of `Names`, and what the name says."""

    process: ActorHandle[Any]
    key: str
    pool: str
    role: str
    rank: int
    number: int


def _listed() -> list[_Listed]:
    """Return the processes with such names that run."""
    found = []
    for one in cast("list[dict[str, str]]", list_named_actors(all_namespaces=True)):
        parts = one["name"].split("/")
        if one["namespace"] != NAMESPACE or len(parts) != _PARTS:
            continue
        # ValueError: it has exited meanwhile.
        with contextlib.suppress(ValueError):
            key, pool, role, rank, number, _ = parts
            found.append(_Listed(ray.get_actor(one["name"], NAMESPACE), key, pool, role, int(rank), int(number)))
    return found


def _by_role(listed: Iterable[_Listed]) -> dict[str, list[_Listed]]:
    """Return the processes of a pool, in the order of ranks, without the roles that have lost some."""
    of_role: dict[str, list[_Listed]] = defaultdict(list)
    for one in sorted(listed, key=lambda one: one.rank):
        of_role[one.role].append(one)
    return {role: ones for role, ones in of_role.items() if len(ones) == ones[0].number}


async def _renewed(
    pool: str, roles: Mapping[str, Sequence[_Listed]], attempt: int
) -> dict[tuple[str, int], Path] | None:
    """Ask the processes of a pool to continue; return the log file of each, or None if one of them cannot."""
    asked = {(one.role, one.rank): one.process.renew.remote(attempt) for ones in roles.values() for one in ones}
    try:
        answers: list[Path] = await asyncio.wait_for(asyncio.gather(*asked.values()), _ASK_S)
    except (TimeoutError, RayError) as error:
        why = error.cause if isinstance(error, RayTaskError) else error
        words = next(iter(str(why).strip().splitlines()), f"one did not answer within {_ASK_S:g} s")
        logger.info("the processes in pool %s cannot continue and are started again: %s", pool, words)
        return None
    return dict(zip(asked, answers, strict=True))


def _placed_groups(prefix: str) -> list[str]:
    """Return the names of placement groups that begin so, and have all their bundles."""
    entries = placement_group_table().values()
    return [entry["name"] for entry in entries if entry["name"].startswith(prefix) and entry["state"] == "CREATED"]


def _remove_groups(except_for: set[str]) -> None:
    """Remove the placement groups that earlier attempts have left."""
    for entry in placement_group_table().values():
        name = entry["name"]
        if name.count("/") == _PARTS_OF_GROUP - 1 and name not in except_for and entry["state"] != "REMOVED":
            # ValueError: it has been removed meanwhile.
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(name))
