"""Over what processes are connected, in words and in numbers."""

from __future__ import annotations

import logging
from typing import cast

import pytest
from ray.util.placement_group import PlacementGroup

from ppojob_api.v1alpha1.network import RDMA, PoolNetwork
from ppojob_api.v1alpha1.pools import Pool
from ppojob_trainer.worker_groups.connections import (
    between_pools,
    connection_metrics,
    of_ranks,
    of_weights,
    report,
)
from ppojob_trainer.worker_groups.placement import Bundle, PlacedPool

WITH_RDMA = PoolNetwork(rdma=RDMA(resource_name="rdma/hca"))
POOLS = {"big": Pool(name="big", gpus_per_node=2, network=WITH_RDMA), "small": Pool(name="small", gpus_per_node=1)}
SOCKET = of_weights("big", ["small"], [{"NET/Socket": 1}, {}])


def pool_on(name: str, *nodes: str) -> PlacedPool:
    bundles = tuple(Bundle(index, node) for index, node in enumerate(nodes))
    return PlacedPool(name, cast(PlacementGroup, None), bundles, 1.0)


def test_what_the_ranks_saw_is_added_up() -> None:
    found = of_ranks("actor", "big", [{"P2P/CUMEM": 1, "NET/IB/GDRDMA": 1}, {"P2P/CUMEM": 1}])

    assert found is not None
    assert connection_metrics([found]) == {
        "comm_transport/actor/P2P_CUMEM": 2.0,
        "comm_transport/actor/NET_IB_GDRDMA": 1.0,
    }


def test_a_rank_alone_has_no_connections() -> None:
    assert of_ranks("critic", "small", [{}]) is None


def test_an_nccl_that_logs_nothing_is_said() -> None:
    found = of_ranks("actor", "big", [{}, {}])

    assert found is not None
    assert connection_metrics([found]) == {"comm_transport/actor/unknown": 1.0}


def test_weights_and_plugins_have_names_that_every_sink_takes() -> None:
    found = of_weights("big", ["small"], [{"NET/AWS Libfabric/GDRDMA": 1}, {}])

    assert connection_metrics([found]) == {"comm_transport/actor_to_rollout/NET_AWS_Libfabric_GDRDMA": 1.0}


def test_batches_go_through_memory_on_a_node_and_over_tcp_between_nodes() -> None:
    one, two, three = pool_on("a", "n0", "n0", "n1"), pool_on("b", "n0"), pool_on("c", "n2")

    assert connection_metrics(between_pools([one, two, three])) == {
        "comm_transport/pools/a_and_b/RAY_SHM": 1.0,
        "comm_transport/pools/a_and_b/RAY_TCP": 1.0,
        "comm_transport/pools/a_and_c/RAY_TCP": 2.0,
        "comm_transport/pools/b_and_c/RAY_TCP": 1.0,
    }
    assert between_pools([one]) == []


def test_the_log_says_it_in_words(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        report([of_weights("big", ["small"], [{"NET/IB/GDRDMA": 1}, {"P2P/CUMEM": 2}])], POOLS, "logs")

    assert caplog.messages == [
        "weights from actor in pool big to rollout in pool small: 1 x NET/IB/GDRDMA, 2 x P2P/CUMEM"
    ]


def test_tcp_where_there_are_devices_for_rdma_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    report([SOCKET], POOLS, "logs")

    (warning,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert "NCCL uses TCP, although the pods have rdma/hca: NCCL's log is in logs/*.nccl-*.log" in warning


def test_tcp_where_there_are_none_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    report([SOCKET], {**POOLS, "big": POOLS["small"]}, "logs")

    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
