"""What depends on other fields: the pool of each role, the schedule, the GPU resource."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.pools import Role, base_role
from ppojob_api.v1alpha1.resolve import job_root, resolve, reward_workers, roles
from ppojob_api.v1alpha1.rules import check
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.training import Overlap, ResumePolicy, ScheduleMode
from ppojob_api.v1alpha1.validation import parse_manifest
from tests.bad_specs import GONE, GOOD, with_changes

Changes = dict[tuple[str | int, ...], Any]
KL: Changes = {("spec", "algorithm"): {"kl": {"inReward": True}}}
LORA: Changes = {("spec", "model", "actor", "lora"): {"rank": 4}}
LORA_AND_A_COPY = LORA | {("spec", "model", "ref"): {"path": "/data/model"}}
SAMPLES: Changes = {("spec", "rollout"): {"samplesPerPrompt": 2}}
GRPO = SAMPLES | {("spec", "algorithm"): {"advantageEstimator": "GRPO"}}
GRPO_WITH_KL = SAMPLES | {("spec", "algorithm"): {"advantageEstimator": "GRPO", "kl": {"inLoss": True}}}
REWARD_MODEL: Changes = {
    ("spec", "reward"): {"type": "Model"},
    ("spec", "model", "reward"): {"path": "/data/reward-model"},
}
NO_CRITIC_POOL: Changes = {("spec", "placement", "critic"): GONE}
NO_PLACEMENT: Changes = {("spec", "pools", 1): GONE, ("spec", "placement"): GONE}


def _resolved(changes: Changes) -> PPOJobSpec:
    return resolve(parse_manifest(with_changes(changes))[2])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "actor=actor rollout=actor critic=critic reward=critic"),
        (KL, "actor=actor rollout=actor ref=critic critic=critic reward=critic"),
        (KL | LORA, "actor=actor rollout=actor ref=actor critic=critic reward=critic"),
        (KL | LORA_AND_A_COPY, "actor=actor rollout=actor ref=critic critic=critic reward=critic"),
        (KL | NO_CRITIC_POOL, "actor=actor rollout=actor ref=actor critic=actor reward=actor"),
        (KL | NO_PLACEMENT, "actor=actor rollout=actor ref=actor critic=actor reward=actor"),
        (GRPO, "actor=actor rollout=actor reward=actor"),
        (GRPO_WITH_KL, "actor=actor rollout=actor ref=actor reward=actor"),
        (
            KL | {("spec", "placement", "ref"): ["actor"]},
            "actor=actor rollout=actor ref=actor critic=critic reward=critic",
        ),
        ({("spec", "placement", "rollout"): ["critic"]}, "actor=actor rollout=critic critic=critic reward=critic"),
        ({("spec", "placement", "ref"): ["actor"]}, "actor=actor rollout=actor critic=critic reward=critic"),
    ],
    ids=[
        "GAE",
        "kl",
        "adapters",
        "adapters and a copy",
        "one pool",
        "no placement",
        "GRPO",
        "grpo with kl",
        "ref given",
        "rollout given",
        "ref of no use",
    ],
)
def test_every_role_in_use_has_a_pool(changes: Changes, expected: str) -> None:
    placed = {role: pool.name for role, pool in roles(_resolved(changes))}

    assert " ".join(f"{role.value}={placed[role]}" for role in Role if role in placed) == expected


def test_a_reference_in_several_pools_has_the_role_in_each_and_their_order_is_no_other_layout() -> None:
    one, other = (
        _resolved(KL | {("spec", "placement", "ref"): pools}) for pools in (["actor", "critic"], ["critic", "actor"])
    )

    assert [pool.name for role, pool in roles(one) if role is Role.REF] == ["actor", "critic"]
    assert one == other


@pytest.mark.parametrize(
    ("gpus", "workers", "expected"),
    [
        ((2, 1), 1, {"actor": 1}),
        ((2, 1), 2, {"actor": 1, "critic": 1}),
        ((2, 1), 6, {"actor": 4, "critic": 2}),
        ((1, 1), 5, {"actor": 3, "critic": 2}),
        ((1, 8), 9, {"actor": 1, "critic": 8}),
    ],
)
def test_workers_of_a_reward_function_are_divided_over_its_pools_by_gpus(
    gpus: tuple[int, int], workers: int, expected: dict[str, int]
) -> None:
    spec = _resolved(
        {
            ("spec", "placement", "reward"): ["critic", "actor"] if workers > 1 else ["actor"],
            ("spec", "reward", "function", "numWorkers"): workers,
            ("spec", "pools", 0, "gpusPerNode"): gpus[0],
            ("spec", "pools", 1, "gpusPerNode"): gpus[1],
        }
    )

    assert reward_workers(spec) == expected


def test_a_reward_in_several_pools_has_the_role_in_each_and_their_order_is_no_other_layout() -> None:
    workers: Changes = {("spec", "reward", "function", "numWorkers"): 2}
    one, other = (
        _resolved(workers | {("spec", "placement", "reward"): pools})
        for pools in (["actor", "critic"], ["critic", "actor"])
    )

    assert [pool.name for role, pool in roles(one) if role is Role.REWARD] == ["actor", "critic"]
    assert one == other


def test_names_of_processes_in_further_pools_have_the_role_of_the_first_one() -> None:
    names = ["ref", "ref_a", "rollout_a-b", "reward", "reward_model", "reward_model_model", "actor", "referee"]

    assert [base_role(name) for name in names] == [
        "ref", "ref", "rollout", "reward", "reward_model", "reward_model", "actor", "referee",
    ]  # fmt: skip


def test_a_pool_that_is_shared_with_the_rollout_has_the_role_too() -> None:
    spec = _resolved({("spec", "placement", "rollout"): ["actor", "critic"]})

    assert [pool.name for role, pool in roles(spec) if role is Role.ROLLOUT] == ["actor", "critic"]
    assert spec.placement.rollout_pools == ("actor", "critic")
    assert _resolved({}).placement.rollout_pools == ("actor",)


@pytest.mark.parametrize(("given", "resolved"), [(["b"], ["b"]), (["b", "critic", "a"], ["b", "a", "critic"])])
def test_the_order_matters_for_the_first_pool_that_generates_only(given: list[str], resolved: list[str]) -> None:
    more = [{"name": name, "gpusPerNode": 1} for name in ("actor", "critic", "a", "b")]
    spec = _resolved({("spec", "pools"): more, ("spec", "placement", "rollout"): given})

    assert spec.placement.rollout == resolved


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, ScheduleMode.OVERLAPPED),
        (NO_CRITIC_POOL, ScheduleMode.OVERLAPPED),
        (GRPO, ScheduleMode.OVERLAPPED),
        ({("spec", "schedule"): {"mode": "ParallelUpdate"}}, ScheduleMode.PARALLEL_UPDATE),
        ({("spec", "schedule"): {"mode": "Serial"}}, ScheduleMode.SERIAL),
    ],
)
def test_auto_overlaps_with_and_without_a_critic(changes: Changes, mode: ScheduleMode) -> None:
    assert _resolved(changes).schedule.mode is mode


@pytest.mark.parametrize(("given", "resolved"), [({}, 1), ({"maxStaleness": 3}, 3)])
def test_one_step_off_has_its_staleness(given: dict[str, int], resolved: int) -> None:
    off: Changes = {
        ("spec", "schedule"): {"mode": "OneStepOff", **given},
        ("spec", "algorithm"): {"rolloutCorrection": {}},
        ("spec", "pools"): [{"name": name, "gpusPerNode": 1} for name in ("actor", "critic", "rollout")],
        ("spec", "placement", "rollout"): ["rollout"],
    }

    once = _resolved(off)

    assert (once.schedule.mode, once.schedule.max_staleness) == (ScheduleMode.ONE_STEP_OFF, resolved)
    assert list(check(once)) == []
    assert _resolved({}).schedule.max_staleness is None


@pytest.mark.parametrize(
    ("changes", "mode", "kept"),
    [
        ({}, "Auto", [Overlap.VALUES]),
        ({}, "Overlapped", [Overlap.VALUES]),
        (NO_CRITIC_POOL, "Auto", [Overlap.NEXT_GENERATION, Overlap.STREAMING, Overlap.VALUES]),
        (NO_CRITIC_POOL, "Overlapped", [Overlap.VALUES]),
        (GRPO, "Auto", [Overlap.NEXT_GENERATION, Overlap.STREAMING, Overlap.VALUES]),
        (GRPO | {("spec", "algorithm", "dynamicSampling"): {}}, "Auto", [Overlap.NEXT_GENERATION, Overlap.VALUES]),
        (GRPO | {("spec", "placement", "rollout"): ["critic"]}, "Auto", [Overlap.VALUES]),
        (GRPO_WITH_KL | {("spec", "placement", "ref"): ["critic"]}, "Auto", [Overlap.VALUES]),
        # A reward function computes on no device of its pool, a reward model does.
        (
            GRPO | {("spec", "placement", "reward"): ["critic"]},
            "Auto",
            [Overlap.NEXT_GENERATION, Overlap.STREAMING, Overlap.VALUES],
        ),
        (GRPO | REWARD_MODEL | {("spec", "placement", "reward"): ["critic"]}, "Auto", [Overlap.VALUES]),
    ],
)
def test_a_single_pool_has_no_overlaps_between_pools_unless_they_are_asked_for(
    changes: Changes, mode: str, kept: list[Overlap]
) -> None:
    once = _resolved({**changes, ("spec", "schedule"): {"mode": mode, "disabledOverlaps": ["Values"]}})

    assert once.schedule.disabled_overlaps == kept
    assert list(check(once)) == []


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("CUDA", None, "nvidia.com/gpu"),
        ("CPU", None, ""),
        ("CUDA", "amd.com/gpu", "amd.com/gpu"),
        ("CPU", "x/y", "x/y"),
    ],
)
def test_the_gpu_resource_follows_the_device(device: str, given: str | None, expected: str) -> None:
    changes: Changes = {("spec", "device"): device}
    if given:
        changes[("spec", "pools", 0, "gpuResourceName")] = given

    assert _resolved(changes).pool("actor").gpu_resource_name == expected


def test_the_nodes_of_an_elastic_pool_are_the_most_that_it_may_have() -> None:
    spot = {"name": "spot", "gpusPerNode": 2, "elastic": {"minNodes": 1, "maxNodes": 5}}
    pools = [*GOOD["spec"]["pools"], spot]

    once = _resolved({("spec", "pools"): pools, ("spec", "placement", "rollout"): ["actor", "spot"]})

    pool = once.pool("spot")
    assert (pool.nodes, pool.gpus, pool.needed_nodes) == (5, 10, 1)
    assert once.pool("actor").needed_nodes == 1
    assert resolve(once) == once
    assert list(check(once)) == []


def test_resolving_twice_changes_nothing_more() -> None:
    once = _resolved(KL)

    assert resolve(once) == once


def test_a_resolved_spec_is_a_valid_spec() -> None:
    once = _resolved(KL)

    assert PPOJobSpec.model_validate(once.to_wire()) == once


def test_each_job_has_a_separate_folder() -> None:
    by_name = "/data/ppojob/rl-team/arithmetic"

    assert job_root("/data", "rl-team", "arithmetic", "7c4a", ResumePolicy.AUTO) == by_name
    assert job_root("/data", "rl-team", "arithmetic", "7c4a", ResumePolicy.NEVER) == f"{by_name}/runs/7c4a"
