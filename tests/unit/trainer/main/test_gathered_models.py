"""Which models stay gathered through an optimizer step: those for which the pool has room beside everything else."""

from dataclasses import replace

import pytest

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.workers import WorkerSpec
from ppojob_trainer.main.memory_fit import check_memory, stay_gathered
from ppojob_trainer.worker_groups.roles.trained import ModelSize
from tests.unit.trainer.main.test_memory_fit import GB, sizes, spec_of

# 1 B parameters, with next to no activations: on two GPUs a trained one has 8 GB each, and stays gathered in 6 more.
THIN = ModelSize(GB, 80 * GB, layers=1, hidden=1, intermediate=1)


def thin(gpu_gb: float) -> dict[str, ModelSize]:
    return dict.fromkeys(("actor", "critic", "ref"), replace(THIN, gpu_bytes=int(gpu_gb * GB)))


def actors(spec: PPOJobSpec, *gpu_gb: float) -> list[bool]:
    """Whether the actor alone stays gathered on GPUs of these sizes."""
    return [stay_gathered(spec, {"actor": thin(size)["actor"]})["actor"] for size in gpu_gb]


def around(needed_gb: float) -> tuple[float, float]:
    """Sizes of a GPU that just cannot and just can hold so much with a plan's known error of 15 %."""
    return 1.15 * needed_gb - 0.1, 1.15 * needed_gb + 0.1


def test_models_stay_gathered_where_the_pool_has_room_beside_everything_else() -> None:
    # 14 GB, and 4.5 for CUDA in two processes, the engine's too; adapters have next to no gradients: 3 GB.
    assert actors(spec_of(), *around(18.5)) == [False, True]
    assert actors(spec_of(lora={"rank": 8}), *around(7.5)) == [False, True]


def test_beside_experts_more_is_left_free() -> None:
    mixture = replace(THIN, in_experts=GB // 2)
    found = [stay_gathered(spec_of(), {"actor": replace(mixture, gpu_bytes=int(size * GB))}) for size in (23.0, 23.2)]
    assert [one["actor"] for one in found] == [False, True]


def test_on_one_gpu_a_gathered_model_has_no_second_gradients_and_a_frozen_one_no_second_weights() -> None:
    # Critic and reference, 16 and 2 GB, with 2 more for the critic and 4.5 for CUDA.
    found = [stay_gathered(spec_of(), {name: thin(size)[name] for name in ("critic", "ref")}) for size in around(24.5)]
    assert [(one["critic"], one["ref"]) for one in found] == [(False, True), (True, True)]


def test_an_engine_that_is_awake_takes_the_room_of_what_would_stay_gathered() -> None:
    # It takes 30 %, beside 14 GB and 4.5 for CUDA: together 18.5 GB and 35 % of what a GPU holds with the known error.
    engine = {"gpuMemoryUtilization": 0.3, "sleep": False}
    assert actors(spec_of(rollout=engine), *around(18.5 / (1 - 0.3 * 1.15))) == [False, True]


@pytest.mark.parametrize("uses_gpu", [False, True])
def test_workers_take_room_if_they_use_the_gpu(uses_gpu: bool) -> None:
    hooks = [{"after": "Score", "method": "shape"}]
    worker = {"name": "w", "module": "m", "className": "W", "pool": "a", "usesGPU": uses_gpu, "hooks": hooks}
    spec = spec_of().model_copy(update={"workers": (WorkerSpec.model_validate(worker),)})
    # 14 GB, and 4.5 or 6.75 for CUDA.
    assert actors(spec, *around(18.5)) == [False, not uses_gpu]
    assert actors(spec, *around(20.75)) == [not uses_gpu, True]


def test_roles_of_a_pool_stay_gathered_in_turn_while_there_is_room() -> None:
    spec = spec_of()
    together = spec.model_copy(update={"placement": spec.placement.model_copy(update={"critic": "a", "ref": ["a"]})})
    # 8, 8 and 1 GB and 9 for CUDA; then 6 more for the actor, 6 for the critic, 2 for the reference.
    found = [sum(stay_gathered(together, thin(size)).values()) for size in (*around(28), *around(34), *around(40))]
    assert found == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"])
def test_a_model_in_parts_of_layers_stages_or_experts_does_not_stay_gathered_by_default(size: str) -> None:
    spec = spec_of()
    actor = spec.actor.model_copy(update={size: 2})
    placement = spec.placement.model_copy(update={"ref": ["a"]})
    divided = spec.model_copy(update={"actor": actor, "placement": placement})
    assert stay_gathered(divided, thin(80)) == {"actor": False, "critic": True, "ref": False}


def test_reshard_after_forward_decides_if_the_job_sets_it() -> None:
    assert not stay_gathered(spec_of(reshardAfterForward=True), thin(80))["actor"]
    assert stay_gathered(spec_of(reshardAfterForward=False), thin(9))["actor"]
    assert stay_gathered(spec_of(reshardAfterForward=False), {}) == {"actor": True, "critic": False, "ref": False}


def test_models_that_the_job_keeps_gathered_are_counted_beside_activations() -> None:
    # 8 GB of states; 6 GB more are too much, with 4.5 for CUDA in two processes.
    actor, rollout = {"actor": thin(16)["actor"]}, {"gpuMemoryUtilization": 0.3}
    (warning,) = check_memory(spec_of(rollout=rollout, reshardAfterForward=False), actor)
    assert "each GPU has 16.0 GB and about 18.5 GB are needed" in warning
    assert warning.endswith(
        "Lower actor.maxTokensPerGPU (now 16384), remove model.actor.reshardAfterForward, give the pool more GPUs, or "
        "create another PPOJob with model.actor.lora"
    )
    assert check_memory(spec_of(rollout=rollout), actor) == []


def test_a_model_whose_activations_are_unknown_does_not_stay_gathered() -> None:
    assert stay_gathered(spec_of(), sizes(1)) == {"actor": False, "critic": False, "ref": False}
