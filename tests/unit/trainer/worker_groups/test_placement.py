"""Bundles of a pool, parts of a GPU, and what an error says is missing. No Ray: the arithmetic alone."""

from typing import Any, cast

import pytest
from ray.util.placement_group import PlacementGroup

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.main.connection import local_resources
from ppojob_trainer.worker_groups.errors import PoolNotPlacedError
from ppojob_trainer.worker_groups.placement import (
    Bundle,
    PlacedPool,
    bundle_resources,
    explain_shortage,
    gpu_fraction,
)


def spec_of(**changes: Any) -> PPOJobSpec:
    raw: dict[str, Any] = {
        "image": "i",
        "device": "CUDA",
        "model": {"actor": {"path": "/m"}},
        "data": {"train": {"reasoningGym": {"task": "products"}}, "trainBatchSize": 256},
        "reward": {"function": {"module": "r"}},
        "algorithm": {"kl": {"inReward": True}},
        "pools": [{"name": "big", "gpusPerNode": 2}, {"name": "small", "gpusPerNode": 1}],
        "placement": {"actor": "big", "critic": "small"},
        "storage": {"claimName": "c"},
    }
    return resolve(parse_spec({**raw, **changes}))


def test_a_bundle_holds_the_pools_resource_and_a_gpu() -> None:
    spec = spec_of()

    # actor and rollout and the data process; critic, ref, reward and a reward process each.
    assert bundle_resources(spec, spec.pool("big")) == {"pool_big": 1.0, "CPU": 0.003, "GPU": 1.0}
    assert bundle_resources(spec, spec.pool("small")) == {"pool_small": 1.0, "CPU": 0.005, "GPU": 1.0}


def test_hundreds_of_reward_processes_need_less_than_the_two_cpus_of_a_one_gpu_pod() -> None:
    spec = spec_of(reward={"function": {"module": "r", "numWorkers": 256}})

    assert bundle_resources(spec, spec.pool("small"))["CPU"] < 2


def test_on_cpu_no_gpu_is_asked_for() -> None:
    spec = spec_of(device="CPU")

    assert "GPU" not in bundle_resources(spec, spec.pool("big"))
    assert gpu_fraction(spec, "big") == 0.0


def test_roles_that_share_a_gpu_have_equal_parts_that_fit() -> None:
    assert gpu_fraction(spec_of(), "big") == 0.5
    together = spec_of(
        pools=[{"name": "one", "gpusPerNode": 1}], placement={"actor": "one", "rollout": ["one"], "critic": "one"}
    )
    assert gpu_fraction(together, "one") == 0.25
    three = spec_of(algorithm={}, pools=[{"name": "one", "gpusPerNode": 1}], placement={"actor": "one"})
    assert gpu_fraction(three, "one") * 3 <= 1


def test_a_reference_that_is_the_actor_takes_no_separate_part() -> None:
    spec = spec_of(model={"actor": {"path": "/m", "lora": {"rank": 8}}})

    assert spec.placement.ref == ["big"]
    assert gpu_fraction(spec, "big") == 0.5, "actor and rollout"


def test_a_reference_in_several_pools_takes_a_part_of_the_gpus_of_each() -> None:
    spec = spec_of(placement={"actor": "big", "critic": "small", "ref": ["big", "small"]})

    assert gpu_fraction(spec, "big") == 0.333, "actor, rollout and reference"
    assert gpu_fraction(spec, "small") == 0.5, "critic and reference"


def placed(*nodes: str) -> PlacedPool:
    bundles = tuple(Bundle(index, node) for index, node in enumerate(nodes))
    return PlacedPool("big", cast(PlacementGroup, None), bundles, 0.5)


def test_a_replica_of_several_gpus_has_bundles_of_one_node() -> None:
    replicas = placed("a", "a", "b", "b").in_replicas(2)

    assert [[bundle.index for bundle in replica] for replica in replicas] == [[0, 1], [2, 3]]
    assert [len(replica) for replica in placed("a", "b").in_replicas(1)] == [1, 1]


def test_a_replica_over_nodes_has_all_bundles_of_each() -> None:
    replicas = placed("a", "a", "b", "b", "c", "c", "d", "d").in_replicas(4)

    assert [[bundle.node_id for bundle in replica] for replica in replicas] == [[*"aabb"], [*"ccdd"]]


@pytest.mark.parametrize("nodes", [["a", "b", "b"], ["a", "b", "b", "b", "c", "c"]])
def test_a_replica_with_unequal_parts_on_its_nodes_is_refused_by_its_bundles(nodes: list[str]) -> None:
    with pytest.raises(PoolNotPlacedError, match=r"bundles 0, 1, 2 of pool big on 2 nodes, \[1, 2\] .*engine of 3"):
        placed(*nodes).in_replicas(3)


def test_on_cpus_a_replica_has_one_bundle_on_each_node() -> None:
    replicas = placed("a", "a", "b", "b", "c", "c", "d", "d").in_replicas(2, is_on_cpu=True)

    assert [[bundle.index for bundle in replica] for replica in replicas] == [[0, 2], [4, 6]]


def test_on_one_machine_all_workers_of_a_replica_on_cpus_are_on_the_one_node() -> None:
    one = placed("a", "a", "a", "a")

    assert [[bundle.index for bundle in replica] for replica in one.in_replicas(2, is_on_cpu=True)] == [[0, 1]]
    assert [[bundle.index for bundle in replica] for replica in one.in_replicas(1, is_on_cpu=True)] == [[0]]


REWARD_MODEL = {"actor": {"path": "/m"}, "reward": {"path": "/rm"}}


def test_a_reward_model_takes_a_part_of_its_pools_gpus() -> None:
    spec = spec_of(model=REWARD_MODEL, reward={"type": "Model"})

    assert gpu_fraction(spec, "small") == 0.333, "critic, ref and reward"
    assert bundle_resources(spec, spec.pool("small"))["CPU"] == 0.004, "no process of a reward function"
    both = spec_of(model=REWARD_MODEL, reward={"type": "Both", "function": {"module": "r"}})
    assert gpu_fraction(both, "small") == 0.333
    assert bundle_resources(both, both.pool("small"))["CPU"] == 0.005


def test_a_reward_in_several_pools_has_a_part_of_the_gpus_and_workers_in_each() -> None:
    placement = {"actor": "big", "critic": "small", "reward": ["big", "small"]}
    model = spec_of(model=REWARD_MODEL, reward={"type": "Model"}, placement=placement)
    function = spec_of(reward={"function": {"module": "r", "numWorkers": 6}}, placement=placement)

    assert gpu_fraction(model, "big") == gpu_fraction(model, "small") == 0.333
    assert gpu_fraction(function, "big") == 0.5, "actor and rollout"
    # The roles, the data worker and two workers of the function for each GPU.
    assert bundle_resources(function, function.pool("big"))["CPU"] == 0.006
    assert bundle_resources(function, function.pool("small"))["CPU"] == 0.006


def test_users_workers_have_their_processes_and_where_they_ask_for_it_a_part_of_a_gpu() -> None:
    worker = {"name": "w", "module": "m", "className": "W", "hooks": [{"after": "Step", "method": "f"}]}
    spec = spec_of(workers=[{**worker, "pool": "big", "numWorkers": 3}])

    assert gpu_fraction(spec, "big") == 0.5
    assert bundle_resources(spec, spec.pool("big"))["CPU"] == 0.005
    on_gpu = spec_of(workers=[{**worker, "pool": "big", "numWorkers": 3, "usesGPU": True}])
    assert gpu_fraction(on_gpu, "big") == 0.25, "actor, rollout, and two processes in one of the bundles"


def test_this_machine_has_the_resources_of_all_pools() -> None:
    assert local_resources(spec_of()) == {"pool_big": 2.0, "pool_small": 1.0}


PLENTY = {"pool_big": 2.0, "CPU": 4.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("total", "free", "words"),
    [
        ({}, {}, "the cluster has 0 pool_big, and 2 are needed"),
        (PLENTY | {"pool_big": 1.0}, PLENTY, "the cluster has 1 pool_big, and 2 are needed"),
        (PLENTY | {"GPU": 1.0}, PLENTY, "the cluster has 1 GPU, and 2 are needed"),
        (PLENTY | {"CPU": 0.0}, PLENTY, "the cluster has 0 CPU, and 0.006 are needed"),
        (PLENTY, PLENTY | {"pool_big": 0.0}, "0 of the cluster's 2 pool_big are free"),
        (PLENTY, PLENTY, "no single node has enough"),
    ],
)
def test_a_shortage_names_pool_and_resource(total: dict[str, float], free: dict[str, float], words: str) -> None:
    spec = spec_of()
    pool = spec.pool("big")

    message = explain_shortage(pool, bundle_resources(spec, pool), 120, total, free)

    assert message.startswith(
        "pool big requests 2 bundles of 1 pool_big, 0.003 CPU, 1 GPU, and Ray has not placed them within 120 s: "
    )
    assert words in message
