"""What comes from other hosts in a step, and how long it takes."""

import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.planning import Plan, plan_job
from ppojob_trainer.planning.network import from_other_hosts
from ppojob_trainer.planning.report import as_json, as_text
from ppojob_trainer.planning.seconds import TimedRun, seconds_of
from ppojob_trainer.planning.traffic import links_of
from ppojob_trainer.planning.work import Measured, Traffic, Work
from tests.unit.trainer.planning.jobs import job, write_config
from tests.unit.trainer.planning.measured import measure
from tests.unit.trainer.planning.stubs import H200, OF_ROLE, plan, stub, work_of
from tests.unit.trainer.planning.test_role_memory import work as role_work

CHUNK = 6
PHASES = ("old_log_prob", "values", "ref", "update_critic", "update_actor", "gen")
TWO_HOSTS: dict[str, Any] = {"pools": [{"name": "all", "gpusPerNode": 2, "nodes": 2}]}


def entering(ranks: list[int], host: int, per_host: int) -> int:
    """Let chunks go around a ring until each rank has all of them; return the bytes that enter a host."""
    held = {rank: {rank} for rank in ranks}
    moving = {rank: rank for rank in ranks}
    total = 0
    for _ in ranks[1:]:
        moving = {ranks[(place + 1) % len(ranks)]: moving[rank] for place, rank in enumerate(ranks)}
        for place, rank in enumerate(ranks):
            held[rank].add(moving[rank])
            came_from = ranks[place - 1]
            total += CHUNK * (rank // per_host == host != came_from // per_host)
    assert all(found == set(ranks) for found in held.values())
    return total


@pytest.mark.parametrize(
    ("ranks", "per_host"),
    [([0, 1, 2, 3], 2), ([0, 1, 2, 3, 4, 5], 2), ([0, 2, 4, 6], 2), ([0, 4], 4), ([0, 1, 2, 3], 4), ([0, 1, 2, 3], 1)],
)
def test_a_ring_brings_its_bytes_to_each_host_once(ranks: list[int], per_host: int) -> None:
    size = CHUNK * len(ranks)
    for host in {rank // per_host for rank in ranks}:
        local = [rank for rank in ranks if rank // per_host == host]
        of_each = [from_other_hosts("_allgather_base_", size, ranks, rank, per_host) for rank in local]
        assert sum(of_each) == pytest.approx(entering(ranks, host, per_host))
        reduced = [from_other_hosts("allreduce_", size, ranks, rank, per_host) for rank in local]
        assert sum(reduced) == pytest.approx(2 * entering(ranks, host, per_host))


def test_exchanges_and_messages_come_from_where_they_were() -> None:
    # A rank of four has a quarter for each, and half of them are on the other host.
    assert from_other_hosts("all_to_all_single", 8, [0, 1, 2, 3], 1, 2) == 4
    assert from_other_hosts("recv_", 8, [1, 3, 5], 3, 2, source=0) == 8
    assert from_other_hosts("recv_", 8, [1, 3, 5], 3, 4, source=0) == 0


@pytest.mark.parametrize(
    ("dims", "per_host", "gather", "reduce"),
    [
        (ParallelDims(shard=4), 4, 0, 0),
        (ParallelDims(shard=4), 2, 3 / 4 / 2, 3 / 4 / 2),
        (ParallelDims(shard=4), 1, 3 / 4, 3 / 4),
        # Copies on two hosts: parameters are gathered on a host, and the sums of half of the gradients are exchanged.
        (ParallelDims(replicate=2, shard=2), 2, 0, None),
    ],
)
def test_ranks_on_two_hosts_gather_and_reduce_over_the_network(
    tmp_path: Path, dims: ParallelDims, per_host: int, gather: float, reduce: float | None
) -> None:
    found = measure(replace(role_work(tmp_path, dims), per_host=per_host)).update_traffic
    received, outside = found.received, found.from_other_hosts
    assert outside["gather"] == pytest.approx(gather * received["gather"], rel=0.01)
    if reduce is None:
        # Of the gradients: reduced over the host's two ranks, then the half of each is reduced with the other host's.
        assert received["reduce"] == pytest.approx(1.5 * 2 * outside["reduce"], rel=0.05)
    else:
        assert outside["reduce"] == pytest.approx(reduce * received["reduce"], rel=0.01)


def test_a_stage_on_another_host_receives_over_the_network(tmp_path: Path) -> None:
    dims = ParallelDims(pipeline=2)
    near, far = (measure(replace(role_work(tmp_path, dims), per_host=size)).traffic for size in (2, 1))
    assert near.received["pipeline"] == far.received["pipeline"] == far.from_other_hosts["pipeline"] > 0
    assert near.from_other_hosts["pipeline"] == 0


def outside_plan(folder: Path, traffic: Traffic, **sections: Any) -> Plan:
    """Return the plan of roles whose passes and updates all have this traffic for a micro-batch."""

    def runner(of_role: Work) -> Measured:
        trained = traffic if of_role.training is not None else Traffic()
        return replace(stub(of_role), traffic=traffic, update_traffic=trained)

    spec = job(write_config(folder), **sections)
    return plan_job(spec, {pool.name: H200 for pool in spec.pools}, runner=runner)


def test_bytes_and_seconds_by_hand(tmp_path: Path) -> None:
    traffic = Traffic(Counter(), Counter(gather=3, reduce=2, experts=7))
    found = outside_plan(tmp_path, traffic, **TWO_HOSTS)
    work = work_of(found)
    # 32 sequences on four ranks, 8 of 128 tokens in a micro-batch: one.
    assert work.prefetched == {"old_log_prob": 5, "values": 5, "ref": 5, "update_critic": 5, "update_actor": 5} | {
        "update_weights": 0
    }
    # An engine has one host.
    assert work.awaited == dict.fromkeys(work.operations, 7) | {"gen": 0}

    alone = replace(work, prefetched={}, awaited={})
    runs = [TimedRun(alone, dict.fromkeys(PHASES, 4.0), H200)]
    plain = seconds_of(found.spec, alone, H200, runs).phases
    fast = seconds_of(found.spec, work, H200, runs, network=2.0)
    slow = seconds_of(found.spec, work, H200, runs, network=0.5)
    # 5 bytes beside the computation of 4 seconds, and 7 after it.
    assert (plain["ref"], fast.phases["ref"], slow.phases["ref"]) == pytest.approx((4.0, 4.0 + 3.5, 10.0 + 14.0))
    assert fast.network["ref"] == pytest.approx(6.0)
    assert fast.network["gen"] == 0
    assert fast.phases["gen"] == plain["gen"]


@pytest.mark.parametrize("nodes", [(2, 2), (1, 2), (2, 1)])
def test_each_of_several_pools_with_the_reference_has_its_share(tmp_path: Path, nodes: tuple[int, int]) -> None:
    """32 sequences in micro-batches of 8; what comes from other hosts is that of the pool with the most of it."""

    def runner(of_role: Work) -> Measured:
        outside = 3000 if of_role.dims.world_size > 2 else 0
        return replace(stub(of_role), traffic=Traffic(Counter(gather=3), Counter(gather=outside)))

    pools = [{"name": name, "nodes": of_pool, "gpusPerNode": 2} for name, of_pool in zip("ab", nodes, strict=True)]
    placement = {"actor": "a", "ref": ["a", "b"]}
    spec = job(write_config(tmp_path), pools=pools, placement=placement)
    found = plan_job(spec, {"a": H200, "b": H200}, runner=runner)

    shares = [of_pool / sum(nodes) for of_pool in nodes]
    passes = [-(-32 // (2 * of_pool) // 8) for of_pool in nodes]
    outsides = [
        3000 * share * number for share, number, of_pool in zip(shares, passes, nodes, strict=True) if of_pool > 1
    ]
    assert work_of(found).prefetched["ref"] == pytest.approx(max(outsides))


def test_weights_cross_the_network_to_pools_on_other_hosts(tmp_path: Path) -> None:
    def of_push(*sizes: tuple[int, int]) -> float:
        pools = [{"name": f"p{at}", "nodes": nodes, "gpusPerNode": gpus} for at, (nodes, gpus) in enumerate(sizes)]
        found = plan(tmp_path, pools=pools, placement={"actor": "p0", "rollout": ["p1"]})
        return work_of(found).prefetched["update_weights"]

    # 100 parameters in bfloat16.
    assert of_push((1, 4), (1, 4)) == 0
    assert of_push((1, 4), (1, 8)) == of_push((2, 2), (1, 2)) == 200


def test_the_gather_for_a_push_crosses_the_network_too(tmp_path: Path) -> None:
    def runner(of_role: Work) -> Measured:
        return replace(OF_ROLE[of_role.kind], push_traffic=Traffic(Counter(), Counter(gather=60)))

    found = plan_job(job(write_config(tmp_path), **TWO_HOSTS), {"all": H200}, runner=runner)
    assert work_of(found).prefetched["update_weights"] == 60


def test_the_plan_shows_the_network_of_jobs_on_several_hosts_alone(tmp_path: Path) -> None:
    def shown(found: Plan, network: float | None = None) -> str:
        printed = StringIO()
        Console(file=printed, width=300).print(as_text(found, network=network))
        return printed.getvalue()

    traffic = Traffic(Counter(gather=4 * 10**9), Counter(gather=3 * 10**9))
    inside, outside = outside_plan(tmp_path, Traffic()), outside_plan(tmp_path, traffic, **TWO_HOSTS)
    assert "network between hosts" not in shown(inside)
    assert "50 GB/s for each GPU (--network); no run on several hosts was measured" in shown(outside)
    assert "12.5 GB/s for each GPU" in shown(outside, 12.5e9)
    roles = {name: one.role for name, one in outside.roles.items()}
    links = links_of(outside.spec, roles, {name: one.measured for name, one in outside.roles.items()})
    (ref,) = [link for link in links if link.what == "ref: gather"]
    assert (ref.bytes_each, ref.from_other_hosts) == (4e9, 3e9)
    (default, slow) = (json.loads(as_json(outside, network=network)) for network in (None, 1e9))
    assert default["networkSeconds"]["ref"] == pytest.approx(3 / 50)
    assert slow["networkSeconds"]["ref"] == slow["seconds"]["ref"] == 3
