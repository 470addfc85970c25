"""What the memory checks propose: each change is one that the job can make, and that would help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.main.host_memory import saves_in_background
from ppojob_trainer.main.memory_fit import check_memory
from ppojob_trainer.worker_groups.roles.trained import ModelSize
from tests.unit.trainer.main.test_memory_fit import GB, in_one_pool, sizes, spec_of

# As Qwen3-30B-A3B with a rank of 16: adapters take 16 bytes for each of their parameters, and frozen weights 2.
MIXTURE = ModelSize(
    30 * GB, 80 * GB, layers=48, hidden=2048, in_adapters=9 * GB // 10, in_expert_adapters=8 * GB // 10, host="one"
)
SMALLER = (
    "create another PPOJob with a smaller model.actor.lora.rank (now 16) or fewer layers in "
    "model.actor.lora.targetModules (experts have 89% of the adapters)"
)


def refusal(spec: PPOJobSpec, found: dict[str, ModelSize]) -> str:
    with pytest.raises(ModelMismatchError) as caught:
        check_memory(spec, found)
    return str(caught.value).rpartition(". ")[2]


def warning(spec: PPOJobSpec, found: dict[str, ModelSize]) -> str:
    (said,) = check_memory(spec, found)
    return said.rpartition(". ")[2]


def adapted(gpus: int = 1, targets: tuple[str, ...] = (), rank: int = 16, **model: Any) -> PPOJobSpec:
    return spec_of(gpus, {"gpuMemoryUtilization": 0.9}, lora={"rank": rank, "targetModules": list(targets)}, **model)


def without_engine(spec: PPOJobSpec) -> PPOJobSpec:
    return spec.model_copy(update={"placement": spec.placement.model_copy(update={"rollout": ["c"]})})


def test_a_role_that_is_too_large_alone_gets_smaller_adapters_and_nothing_for_other_roles() -> None:
    """60 GB of weights and 14 of adapters; the engine, which sleeps meanwhile, has the GPU when all are offloaded."""
    small = {"actor": replace(MIXTURE, gpu_bytes=70 * GB)}
    both = {"parameters": True, "optimizer": True}
    assert refusal(adapted(offload=both), small) == f"Give the pool more GPUs or {SMALLER}"


def test_beside_an_engine_that_slept_offload_and_its_share_help_too() -> None:
    assert refusal(adapted(), {"actor": MIXTURE}) == (
        "Give the pool more GPUs, move a role to another pool, use model.actor.offload, lower "
        f"rollout.gpuMemoryUtilization, or {SMALLER}"
    )


def test_beside_an_engine_that_is_awake_offload_does_not_help() -> None:
    spec = adapted()
    awake = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"sleep": False})})
    assert refusal(awake, {"actor": MIXTURE}) == (
        "Give the pool more GPUs, move a role to another pool, set rollout.sleep: true, lower "
        f"rollout.gpuMemoryUtilization, or {SMALLER}"
    )


def test_small_adapters_are_not_proposed_to_be_smaller() -> None:
    """Of the attention alone: 0.2 of 60 GB."""
    attention = replace(MIXTURE, gpu_bytes=50 * GB, in_adapters=GB // 75, in_expert_adapters=0)
    spec = without_engine(adapted(targets=("q_proj",)))
    assert refusal(spec, {"actor": attention}) == "Give the pool more GPUs"


@pytest.mark.parametrize(
    ("rank", "targets", "expected"),
    [
        (1, ("up_proj",), []),
        (1, (), ["fewer layers"]),
        (8, ("up_proj",), ["a smaller model.actor.lora.rank (now 8)"]),
    ],
)
def test_adapters_that_cannot_be_smaller_are_not_proposed(
    rank: int, targets: tuple[str, ...], expected: list[str]
) -> None:
    said = refusal(adapted(rank=rank, targets=targets), {"actor": MIXTURE})
    assert [words for words in ("a smaller model.actor.lora.rank (now 8)", "fewer layers") if words in said] == expected


def test_roles_in_one_pool_can_be_moved_offloaded_and_trained_by_adapters() -> None:
    spec = in_one_pool(offload={"parameters": True, "optimizer": True})
    said = refusal(spec, sizes(6, gpu_gb=70))
    assert said == (
        "Give the pool more GPUs, move a role to another pool, use model.critic.offload or model.ref.offload, or "
        "create another PPOJob with model.actor.lora or model.critic.lora"
    )


def test_a_warning_names_the_budgets_that_can_be_lower_and_the_adapters() -> None:
    """37.2 GB of weights, gradients and moments on each GPU, 3.8 of activations, and 2.25 for CUDA."""
    spec = without_engine(adapted(gpus=2))
    assert warning(spec, {"actor": replace(MIXTURE, gpu_bytes=42 * GB)}) == (
        f"Lower actor.maxTokensPerGPU (now 16384), give the pool more GPUs, or {SMALLER}"
    )


def test_a_warning_does_not_propose_fewer_tokens_than_a_sequence_has() -> None:
    """1.6 GB of activations of 512 + 512 tokens."""
    spec = without_engine(adapted(gpus=2, gradientCheckpointing=False))
    lowest = spec.model_copy(update={"actor": spec.actor.model_copy(update={"max_tokens_per_gpu": 1024})})
    small = {"actor": replace(MIXTURE, gpu_bytes=40 * GB)}
    assert warning(lowest, small) == (
        f"Set model.actor.gradientCheckpointing: true, give the pool more GPUs, or {SMALLER}"
    )


def test_a_host_that_is_too_small_for_what_is_offloaded() -> None:
    """60 GB of frozen weights, and 10.8 GB of adapters with their moments."""
    spec = adapted(offload={"parameters": True, "optimizer": True})
    with pytest.raises(ModelMismatchError) as caught:
        saves_in_background(spec, {"actor": replace(MIXTURE, host_bytes=70 * GB)})
    assert str(caught.value).endswith(
        f"actor 70.8. Give the pools more memory (resourcesPerGPU.memory), leave out model.actor.offload, or {SMALLER}"
    )
