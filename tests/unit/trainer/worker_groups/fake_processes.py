"""Groups of processes that answer from a table: replicas of the rollout, and the actor that sends them weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.engines.weights.plans import LinkPlan, WeightLink
from ppojob_trainer.engines.weights.receipts import Receipt
from ppojob_trainer.worker_groups.errors import (
    WorkerGroupError,
)
from ppojob_trainer.worker_groups.roles.actor import ActorWorker
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker
from ppojob_trainer.worker_groups.roles.rollout_group import Replicas, RolloutGroup
from ppojob_trainer.worker_groups.worker_group import WorkerGroup


class Processes:
    """Answers calls from a table, and remembers their arguments."""

    def __init__(self, number: int, answers: dict[Any, Callable[..., Any]]) -> None:
        self.number, self.answers = number, answers
        self.calls: dict[Any, Any] = {}
        self.arguments: dict[Any, tuple[Any, ...]] = {}
        self.ranks, self.killed = list(range(number)), list[int]()

    def only(self, *ranks: int) -> Processes:
        part = Processes(len(ranks), self.answers)
        part.calls, part.arguments, part.killed = self.calls, self.arguments, self.killed
        part.ranks = [self.ranks[rank] for rank in ranks]
        return part

    def kill(self) -> None:
        self.killed += self.ranks

    def __len__(self) -> int:
        return self.number

    def call(self, method: Any, *args: Any) -> asyncio.Future[Any]:
        self.calls[method], self.arguments[method] = args[0] if args else None, args
        answer = asyncio.get_running_loop().create_future()
        try:
            answer.set_result(self.answers.get(method, lambda *_: None)(*args))
        except WorkerGroupError as failure:
            answer.set_exception(failure)
        return answer


def as_group(processes: Processes) -> WorkerGroup[Any]:
    return cast("WorkerGroup[Any]", processes)


def group_of(spec: PPOJobSpec, replicas: Processes, holders: Processes | None = None) -> RolloutGroup:
    """Those of the rollout's own pool."""
    return RolloutGroup(replicas_of(replicas, holders), spec, spec.placement.rollout_pools[0])


def replicas_of(replicas: Processes, holders: Processes | None = None, num_nodes: int = 1) -> Replicas:
    return Replicas(as_group(replicas), None if holders is None else as_group(holders), num_nodes)


def spec_of(placement: dict[str, Any]) -> PPOJobSpec:
    return resolve(
        parse_spec(
            {
                "image": "i",
                "model": {"actor": {"path": "/m"}},
                "data": {"train": {"reasoningGym": {"task": "t"}}, "trainBatchSize": 256},
                "reward": {"function": {"module": "r"}},
                "pools": [{"name": "train", "gpusPerNode": 4}, {"name": "write", "gpusPerNode": 4}],
                "placement": placement,
                "rollout": {"tensorParallelSize": 2},
                "storage": {"claimName": "c"},
            }
        )
    )


def receipt(version: int) -> Receipt:
    return Receipt(version, 1, 8, (version,), is_read_back=True)


def link(plan: LinkPlan) -> WeightLink:
    return WeightLink(plan.backend, f"rank {plan.sender_rank}", 1, len(plan.receivers), 9)


def actor(sends: Callable[[int], Receipt] = receipt) -> Processes:
    """Four ranks that send the same over each of their links."""
    links: list[list[WeightLink]] = []

    def opened(plans: list[list[LinkPlan]]) -> list[list[WeightLink]]:
        links[:] = [[link(plan) for plan in of_rank] for of_rank in plans]
        return list(links)

    return Processes(
        4,
        {
            ActorWorker.open_weights: opened,
            ActorWorker.connect_weights: lambda: [{"NET/IB": 1}, {}, {}, {}],
            ActorWorker.push_weights: lambda version, is_partial: [
                [sends(version)] * len(of_rank) for of_rank in links
            ],
        },
    )


def places_told(replicas: Processes) -> list[list[tuple[str, int]]]:
    """For each worker of each replica the sender and the number it connects with."""
    told = replicas.calls[RolloutWorker.connect_weights]
    return [[(link.address, number) for link, number in each] for each in told]
