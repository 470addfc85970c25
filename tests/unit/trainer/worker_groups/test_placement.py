"""Bundles of a pool, parts of a GPU, and what an error says is missing. No Ray: the arithmetic alone."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.main.connection import local_resources
from ppojob_trainer.worker_groups.placement import bundle_resources, explain_shortage, gpu_fraction


def spec_of(**changes: Any) -> PPOJobSpec:
    raw: dict[str, Any] = {
        "image": "i",
        "device": "cuda",
        "model": {"actor": {"path": "/m"}},
        "data": {"train": {"type": "ReasoningGym", "reasoningGym": {"task": "products"}}, "trainBatchSize": 256},
        "reward": {"function": {"module": "r"}},
        "algorithm": {"kl": {"inReward": True}},
        "pools": [{"name": "big", "gpusPerNode": 2}, {"name": "small", "gpusPerNode": 1}],
        "placement": {"actor": "big", "critic": "small"},
        "storage": {"persistentVolumeClaim": "c"},
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
    spec = spec_of(device="cpu")

    assert "GPU" not in bundle_resources(spec, spec.pool("big"))
    assert gpu_fraction(spec, "big") == 0.0


def test_roles_that_share_a_gpu_have_equal_parts_that_fit() -> None:
    assert gpu_fraction(spec_of(), "big") == 0.5
    together = spec_of(
        pools=[{"name": "one", "gpusPerNode": 1}], placement={"actor": "one", "rollout": "one", "critic": "one"}
    )
    assert gpu_fraction(together, "one") == 0.25
    three = spec_of(algorithm={}, pools=[{"name": "one", "gpusPerNode": 1}], placement={"actor": "one"})
    assert gpu_fraction(three, "one") * 3 <= 1


def test_this_machine_stands_for_all_pools() -> None:
    assert local_resources(spec_of()) == {"pool_big": 2.0, "pool_small": 1.0}


PLENTY = {"pool_big": 2.0, "CPU": 4.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("total", "free", "words"),
    [
        ({}, {}, "the cluster has 0 pool_big, wanted are 2"),
        (PLENTY | {"pool_big": 1.0}, PLENTY, "the cluster has 1 pool_big, wanted are 2"),
        (PLENTY | {"GPU": 1.0}, PLENTY, "the cluster has 1 GPU, wanted are 2"),
        (PLENTY | {"CPU": 0.0}, PLENTY, "the cluster has 0 CPU, wanted are 0.006"),
        (PLENTY, PLENTY | {"pool_big": 0.0}, "only 0 of the cluster's 2 pool_big are free"),
        (PLENTY, PLENTY, "no single node has enough"),
    ],
)
def test_a_shortage_names_pool_and_resource(total: dict[str, float], free: dict[str, float], words: str) -> None:
    spec = spec_of()
    pool = spec.pool("big")

    message = explain_shortage(pool, bundle_resources(spec, pool), 120, total, free)

    assert message.startswith(
        "pool big wants 2 bundles of 1 pool_big, 0.003 CPU, 1 GPU and did not get them in 120 s: "
    )
    assert words in message
