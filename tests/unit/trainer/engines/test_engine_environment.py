"""Which variables a role's processes are started with."""

from __future__ import annotations

from typing import Any

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.engines.environment import pool_environment
from ppojob_trainer.worker_groups.roles.rollout import rollout_environment
from tests.bad_specs import GOOD

NETWORK = {"interface": "eth1", "nccl": {"NCCL_NVLS_ENABLE": "1", "NCCL_IB_HCA": "mlx5_0"}}


def spec_of(**actor_pool: Any) -> PPOJobSpec:
    pools = [{"name": "actor", "gpusPerNode": 2, **actor_pool}, {"name": "critic", "gpusPerNode": 1}]
    return resolve(parse_spec({**GOOD["spec"], "pools": pools}))


def test_a_pools_own_network_wins_over_our_settings() -> None:
    found = pool_environment(spec_of(network=NETWORK), "actor")

    assert found["NCCL_NVLS_ENABLE"] == "1"
    assert found["NCCL_IB_HCA"] == "mlx5_0"
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=eth1", "eth1")


def test_another_pool_has_none_of_it() -> None:
    found = pool_environment(spec_of(network=NETWORK), "critic")

    assert found["NCCL_NVLS_ENABLE"] == "0"
    assert "NCCL_SOCKET_IFNAME" not in found


def test_the_engines_that_write_have_the_network_of_their_pool_too() -> None:
    assert rollout_environment(spec_of(network=NETWORK), "actor").items() >= {
        ("NCCL_NVLS_ENABLE", "1"),
        ("GLOO_SOCKET_IFNAME", "eth1"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
    }
