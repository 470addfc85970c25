"""Starts the processes of a role in its pool's bundles and waits until they are up.

Called by the roles' groups. The error of a process that cannot start names its role and rank; nothing is restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle

from ppojob_api.v1alpha1.pools import base_role
from ppojob_api.v1alpha1.telemetry import ProfileSpec
from ppojob_trainer.worker_groups.errors import CallTimeoutError
from ppojob_trainer.worker_groups.observation import Observations
from ppojob_trainer.worker_groups.placement import CPUS_PER_PROCESS, Bundle, PlacedPool
from ppojob_trainer.worker_groups.survivors import NO_SURVIVORS, Survivors
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext, WorkerProcess

__all__ = ["Launcher", "wait_until_up"]

W = TypeVar("W")

START_TIMEOUT_S = 600.0
"""Longest time for a process to start and import its libraries; on busy cores that takes minutes."""


@dataclass(frozen=True)
class Launcher:
    """The settings that all groups of a job have in common.

    log_folder: where each process writes `<role>-<rank>.log`.
    timeout_s: time limit of one phase.
    run_folder: the job's folder, for files other than logs.
    profile: which roles and steps torch's profiler records.
    observations: collects the measurements of the processes.
    survivors: processes of an earlier attempt, which are used instead of starting new ones.
    attempt: number of this attempt.
    """

    log_folder: Path
    timeout_s: float
    run_folder: Path | None = None
    profile: ProfileSpec | None = None
    observations: Observations = field(default_factory=Observations)
    survivors: Survivors = NO_SURVIVORS
    attempt: int = 0

    def none_of(self, role: str, worker: type[W]) -> WorkerGroup[W]:
        """Return a role's group without any process yet."""
        return self._group(role, ())

    def start(
        self,
        role: str,
        make: Callable[[WorkerContext], W],
        pool: PlacedPool,
        bundles: Sequence[Bundle],
        *,
        gpu_fraction: float = 0.0,
        environment: Mapping[str, str] | None = None,
        first_rank: int = 0,
    ) -> WorkerGroup[W]:
        """Start one process for each of `bundles`, in the order of ranks. Does not wait: see `wait_until_up`.

        If `survivors` has the role's processes, they are returned.

        Args:
            make: creates the worker in its process; must be importable there.
            gpu_fraction: share of the bundle's GPU; with 0, none is reserved, but the process may see the node's.
            environment: environment variables of the processes.
            first_rank: of these processes, if the role has others that were started before.
        """
        if kept := self.survivors.of_role(pool.name, role):
            return self._group(role, kept, first_rank)
        processes: list[ActorHandle[Any]] = []
        for rank, bundle in enumerate(bundles, first_rank):
            local_world_size = sum(other.node_id == bundle.node_id for other in bundles)
            context = WorkerContext(
                role,
                rank,
                len(bundles),
                local_world_size,
                self.log_folder / f"{role}-{rank}.log",
                self.timeout_s,
                attempt=self.attempt,
                run_folder=self.run_folder,
                profile=self.profile if self.profile and base_role(role) in self.profile.roles else None,
            )
            options: dict[str, Any] = {
                "num_cpus": CPUS_PER_PROCESS,
                "num_gpus": gpu_fraction,
                "scheduling_strategy": pool.strategy(bundle),
                # No restarts: the other ranks' shards of a model are useless without those of the lost process, so the
                # attempt ends. The rollout's replicas hold no shards: the run continues without a lost one, and an
                # elastic pool starts another one.
                "max_restarts": 0,
                **self.survivors.actor_options(pool.name, role, rank, len(bundles)),
            }
            if environment:
                options["runtime_env"] = {"env_vars": dict(environment)}
            started = ray.remote(WorkerProcess).options(**options).remote(context, make)
            processes.append(cast("ActorHandle[Any]", started))
        return self._group(role, processes, first_rank)

    def _group(self, role: str, processes: Sequence[ActorHandle[Any]], first_rank: int = 0) -> WorkerGroup[Any]:
        ranks = range(first_rank, first_rank + len(processes))
        return WorkerGroup(
            role, processes, self.timeout_s, observations=self.observations, ranks=ranks, attempt=self.attempt
        )


async def wait_until_up(groups: Sequence[WorkerGroup[Any]]) -> None:
    """Wait for all processes of the groups.

    Raises:
        WorkerGroupError: a process did not start in time or failed; names its role.
    """
    await asyncio.gather(*(_up(group) for group in groups))


async def _up(group: WorkerGroup[Any]) -> None:
    try:
        await asyncio.wait_for(_addresses(group), START_TIMEOUT_S)
    except TimeoutError as error:
        raise CallTimeoutError(
            f"the {len(group)} processes of role {group.role} were not up within {START_TIMEOUT_S:g} s: "
            "see Ray's logs on their nodes"
        ).of(group.role) from error


async def _addresses(group: WorkerGroup[Any]) -> list[str]:
    return await group.addresses()
