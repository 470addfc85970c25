"""The least memory that the roles of a pool need, computed by hand, and which placements are refused."""

import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ppojob_api.v1alpha1.model import FrozenOffload, RewardModel
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.reward import RewardSpec, RewardType
from ppojob_api.v1alpha1.rollout import RolloutSpec
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.engines.host import host_bytes
from ppojob_trainer.main.memory_fit import check_memory, engine_weights, needs, pool_memory, stay_gathered
from ppojob_trainer.worker_groups.roles.trained import ModelSize, ModelSource, TrainedWorker, size_of
from ppojob_trainer.worker_groups.worker_process import WorkerContext
from tests.integration.trainer.tiny_model import write_tiny_model

GB = 10**9


def spec_of(gpus: int = 2, rollout: dict[str, Any] | None = None, **model: Any) -> PPOJobSpec:
    raw = {
        "image": "i",
        "model": {"actor": {"path": "/m", **model}},
        "data": {"train": {"reasoningGym": {"task": "products"}}, "trainBatchSize": 256},
        "reward": {"function": {"module": "r"}},
        "algorithm": {"kl": {"inReward": True}, "rolloutCorrection": {}},
        "rollout": rollout or {},
        "pools": [{"name": "a", "gpusPerNode": gpus}, {"name": "c", "gpusPerNode": 1}],
        "placement": {"actor": "a", "critic": "c"},
        "storage": {"claimName": "c"},
    }
    return resolve(parse_spec(raw))


def sizes(billions: float, gpu_gb: float = 80) -> dict[str, ModelSize]:
    size = ModelSize(int(billions * GB), int(gpu_gb * GB))
    return {"actor": size, "critic": size, "ref": size}


def test_needs_by_hand() -> None:
    """1 B parameters: 4 GB weights, 4 GB gradients and 8 GB moments, halved over two GPUs; the reference 2 GB."""
    found = needs(spec_of(), sizes(1))

    (actor,), (critic, ref) = found["a"], found["c"]
    assert (actor.weights, actor.gradients, actor.optimizer, actor.resident) == (2 * GB, 2 * GB, 4 * GB, 6 * GB)
    assert (critic.total, critic.resident) == (16 * GB, 12 * GB)
    assert (ref.total, ref.resident) == (2 * GB, 2 * GB)


def test_each_copy_of_a_model_has_fewer_gpus() -> None:
    spec = spec_of(4)
    hybrid = spec.model_copy(update={"actor": spec.actor.model_copy(update={"fsdp_size": 2})})
    divided = hybrid.actor.model_copy(update={"fsdp_size": 1, "tensor_parallel_size": 2})
    tensor = hybrid.model_copy(update={"actor": divided})
    for each, weights in ((spec, GB), (hybrid, 2 * GB), (tensor, 2 * GB)):
        (actor,) = needs(each, sizes(1))["a"]
        assert actor.weights == weights


def test_adapters_and_offload_need_less() -> None:
    (lora,) = needs(spec_of(lora={"rank": 8}), sizes(1))["a"][:1]
    assert (lora.total, lora.resident) == (1 * GB, 1 * GB)

    (offloaded,) = needs(spec_of(offload={"parameters": True, "optimizer": True}), sizes(1))["a"]
    assert (offloaded.total, offloaded.resident) == (8 * GB, 0)


def test_what_fits_passes() -> None:
    check_memory(spec_of(), sizes(3))


def test_activations_of_full_micro_batches_by_hand() -> None:
    """Of 0.5B with 16,384 tokens 17.1 GB; with 8 GB of weights, gradients and moments a peak of 25.8 was measured."""
    size = ModelSize(GB // 2, 80 * GB, layers=24, hidden=896, intermediate=4864)
    layer = 2 * (8 * 896 + 3 * 4864) * 16_384

    def activations(tokens: int = 16_384, **model: Any) -> float:
        spec = spec_of(**model)
        spec = spec.model_copy(update={"actor": spec.actor.model_copy(update={"max_tokens_per_gpu": tokens})})
        ((actor,),) = needs(spec, {"actor": size}).values()
        return actor.activations

    assert activations(gradientCheckpointing=False) == 24 * layer == pytest.approx(17.1e9, rel=0.01)
    assert activations() == 24 * 2 * 896 * 16_384 + layer
    assert activations(activationOffload=True) == layer
    # A minibatch of 256 prompts on two GPUs has no more than 128 sequences of 512 + 512 tokens on each.
    assert activations(10**6, gradientCheckpointing=False) == pytest.approx(24 * layer * 128 * 1024 / 16_384)


def test_a_pool_without_room_for_full_micro_batches_gets_a_warning() -> None:
    large = ModelSize(3 * GB, 80 * GB, layers=40, hidden=8000, intermediate=20_000)
    (warning,) = check_memory(spec_of(gradientCheckpointing=False), {"actor": large})
    assert "pool a may run out of memory if micro-batches are full: each GPU has 80.0 GB and about" in warning
    assert "activations at maxTokensPerGPU actor 162.5" in warning
    assert check_memory(spec_of(), sizes(3)) == []


def test_a_share_that_does_not_hold_vllms_weights_is_refused() -> None:
    with pytest.raises(ModelMismatchError) as refusal:
        check_memory(spec_of(8, rollout={"gpuMemoryUtilization": 0.1}), {"actor": ModelSize(7 * GB, 80 * GB)})
    assert str(refusal.value) == (
        "rollout.gpuMemoryUtilization 0.1 gives vLLM 8.0 GB of each GPU, and its weights alone take 14.0 GB: raise it, "
        "or rollout.tensorParallelSize (now 1) or rollout.pipelineParallelSize (now 1)"
    )
    replay = {"gpuMemoryUtilization": 0.1, "routingReplay": True}
    with pytest.raises(ModelMismatchError, match=r"raise it, or rollout\.tensorParallelSize \(now 1\)$"):
        check_memory(spec_of(8, rollout=replay), {"actor": ModelSize(7 * GB, 80 * GB)})
    check_memory(
        spec_of(8, rollout={"gpuMemoryUtilization": 0.1, "tensorParallelSize": 4}),
        {"actor": ModelSize(7 * GB, 80 * GB)},
    )


def test_the_largest_stage_of_an_engine_has_most_layers_and_at_most_the_embeddings() -> None:
    """Of 5 billion parameters in 15 layers, two stages have seven and eight."""
    size = ModelSize(7 * GB, 80 * GB, layers=15, in_embeddings=2 * GB)

    found = engine_weights(RolloutSpec(pipeline_parallel_size=2, tensor_parallel_size=4), size)

    assert found == pytest.approx(2 * (5 * GB * 8 / 15 + 2 * GB) / 4)


def test_weights_in_fp8_have_a_byte_but_for_embeddings() -> None:
    fp8 = {"gpuMemoryUtilization": 0.1, "quantization": "FP8"}
    with pytest.raises(ModelMismatchError, match=r"gives vLLM 8\.0 GB of each GPU, and its weights alone take 8\.5 GB"):
        check_memory(spec_of(8, rollout=fp8), {"actor": ModelSize(7 * GB, 80 * GB, in_embeddings=3 * GB // 2)})
    check_memory(spec_of(8, rollout=fp8), {"actor": ModelSize(7 * GB, 80 * GB, in_embeddings=GB // 2)})


def test_a_critic_that_is_too_large_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelMismatchError) as refusal:
        check_memory(spec_of(), sizes(5))

    words = str(refusal.value)
    assert "pool c cannot hold its models: each GPU has 80.0 GB, and at least 90.0 GB are needed" in words
    assert "critic 80.0 (weights 20.0, gradients 20.0, optimizer 40.0); ref 10.0 (weights 10.0)" in words


def in_one_pool(**model: Any) -> PPOJobSpec:
    spec = spec_of(rollout={"gpuMemoryUtilization": 0.2}, **model)
    placed = spec.placement.model_copy(update={"critic": "a", "ref": ["a"]})
    return spec.model_copy(update={"placement": placed})


def test_the_peaks_of_all_roles_in_a_pool_add_up() -> None:
    """4 B parameters on two GPUs: 32 GB each for actor and critic, whose allocators keep them; the reference 4."""
    trained = {"actor": 32 * GB, "critic": 32 * GB}
    roles = needs(in_one_pool(), sizes(4))["a"]
    assert {need.role: need.total for need in roles} == {**trained, "ref": 4 * GB}
    found = pool_memory(in_one_pool(), "a", [(need, need.total) for need in roles], 80 * GB)
    # Engines wake up after the roles have returned what lies between their phases: 24, 24 and 4 GB stay.
    assert (found.training, found.generation, found.engine) == (68 * GB, (52 + 16) * GB, 16 * GB)

    check_memory(in_one_pool(), sizes(4, gpu_gb=69))
    with pytest.raises(ModelMismatchError, match=r"each GPU has 67\.0 GB, and at least 68\.0 GB are needed"):
        check_memory(in_one_pool(), sizes(4, gpu_gb=67))


def test_a_role_with_offload_returns_its_memory_before_another_computes() -> None:
    spec = in_one_pool(offload={"optimizer": True})
    roles = needs(spec, sizes(4))["a"]
    found = pool_memory(spec, "a", [(need, need.total) for need in roles], 80 * GB)
    # While the actor trains, 24 GB more than the 8 of its weights; critic and reference keep 32 and 4.
    assert [need.is_returned for need in roles] == [True, False, False]
    assert found.training == (8 + 24 + 32 + 4) * GB

    both = spec.model_copy(update={"model": spec.model.model_copy(update={"critic": spec.model.actor})})
    roles = needs(both, sizes(4))["a"]
    found = pool_memory(both, "a", [(need, need.total) for need in roles], 80 * GB)
    assert found.training == (8 + 8 + 24 + 4) * GB


@pytest.mark.parametrize(
    ("sleep", "expected"),
    # The actor 30; critic and reference keep 24 and 4 beside an engine that slept, else 32 and 4; weights or share.
    [(True, 30 + 24 + 4 + 8), (False, 30 + 32 + 4 + 16)],
)
def test_a_push_needs_gathered_weights_beside_the_engines(*, sleep: bool, expected: float) -> None:
    spec = in_one_pool()
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"sleep": sleep})})
    roles = [replace(need, push=30 * GB if need.role == "actor" else 0.0) for need in needs(spec, sizes(4))["a"]]

    peaks = [(need, need.total) for need in roles]
    found = pool_memory(spec, "a", peaks, 80 * GB, weights=8 * GB)
    of_experts = pool_memory(spec, "a", peaks, 80 * GB, weights=8 * GB, receiving=3 * GB)

    assert found.push == expected * GB
    assert of_experts.push == (expected + 3) * GB


def test_engines_in_a_pool_of_their_own_need_more_while_they_receive_experts() -> None:
    spec = in_one_pool()
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"sleep": False})})

    assert pool_memory(spec, "a", [], 80 * GB, weights=8 * GB, receiving=3 * GB).push == (16 + 3) * GB
    assert pool_memory(spec, "a", [], 80 * GB, weights=8 * GB).push == 0


def test_an_engine_that_does_not_sleep_is_counted_while_the_actor_trains() -> None:
    # The actor takes 64 of 80 GB in its update and 48 between them; the engine half of the GPU.
    small = {"actor": ModelSize(4 * GB, 80 * GB)}
    check_memory(spec_of(1, rollout={"gpuMemoryUtilization": 0.4}), small)
    with pytest.raises(ModelMismatchError, match=r"rollout 32\.0 \(gpuMemoryUtilization 0.4: weights 8\.0, the rest "):
        check_memory(spec_of(1, rollout={"gpuMemoryUtilization": 0.4, "sleep": False}), small)
    with pytest.raises(ModelMismatchError, match=r"at least 88\.0 GB"):
        check_memory(spec_of(1, rollout={"gpuMemoryUtilization": 0.5}), small)


def test_an_engine_beside_models_that_do_not_train_is_counted_while_they_compute() -> None:
    # The reference's 30 GB lie in the host's memory between its phases; the engine of 56 GB stays awake beside them.
    spec = spec_of(1, rollout={"gpuMemoryUtilization": 0.7})
    placed = spec.placement.model_copy(update={"critic": "a", "ref": ["c"], "rollout": ["a", "c"]})
    ref = spec.model.ref.model_copy(update={"offload": FrozenOffload(parameters=True)})
    shared = spec.model_copy(update={"placement": placed, "model": spec.model.model_copy(update={"ref": ref})})
    assert shared.rollout.sleep

    with pytest.raises(ModelMismatchError, match=r"pool c cannot .* at least 86\.0 GB are needed at the same time"):
        check_memory(shared, {"ref": ModelSize(15 * GB, 80 * GB)})


def test_each_pool_of_the_reference_counts_its_copy() -> None:
    spec = spec_of()
    both = spec.model_copy(update={"placement": spec.placement.model_copy(update={"ref": ["a", "c"]})})
    small = ModelSize(GB, 80 * GB, layers=1, hidden=1, intermediate=1)

    found = needs(both, {"actor": small, "critic": small, "ref": small, "ref_c": small})

    weights = {(pool, need.role): need.weights / GB for pool, roles in found.items() for need in roles}
    # Pool a has two GPUs, pool c one.
    assert weights == {("a", "actor"): 2, ("c", "critic"): 4, ("a", "ref"): 1, ("c", "ref_c"): 2}
    assert stay_gathered(both, {"ref_c": small})["ref_c"]
    assert stay_gathered(both, {}) == {"actor": False, "critic": False, "ref": False, "ref_c": False}


def test_each_pool_of_the_reward_model_counts_its_copy() -> None:
    spec = spec_of()
    placement = spec.placement.model_copy(update={"reward": ["a", "c"]})
    model = spec.model.model_copy(update={"reward": RewardModel(path="/rm")})
    reward = RewardSpec(type=RewardType.MODEL)
    both = spec.model_copy(update={"placement": placement, "model": model, "reward": reward})
    small = ModelSize(GB, 80 * GB, layers=1, hidden=1, intermediate=1)

    found = needs(both, {"reward_model": small, "reward_model_c": small})

    weights = {(pool, need.role): need.weights / GB for pool, roles in found.items() for need in roles}
    assert weights == {("a", "reward_model"): 1, ("c", "reward_model_c"): 2}
    assert stay_gathered(both, {"reward_model": small}) == {"actor": False, "critic": False, "ref": False}


def in_stages(gpus: int, **sizes: int) -> PPOJobSpec:
    spec = spec_of(gpus)
    return spec.model_copy(update={"actor": spec.actor.model_copy(update={"pipeline_parallel_size": 2, **sizes})})


# 1 B parameters, of which 0.2 B are a tied embedding that both stages have.
STAGES = {"actor": ModelSize(GB, 80 * GB, stages=(6 * GB // 10, 6 * GB // 10 - GB // 100))}


def test_the_largest_stage_is_what_a_gpu_holds() -> None:
    for spec, gpus_of_stage in ((in_stages(4), 2), (in_stages(4, fsdp_size=1), 1), (in_stages(2), 1)):
        (actor,) = needs(spec, STAGES)["a"]
        states = (actor.weights, actor.gradients, actor.optimizer)
        assert states == pytest.approx([number * 0.6 * GB / gpus_of_stage for number in (4, 4, 8)])


def test_only_a_stage_stays_gathered() -> None:
    """Of 0.6 B parameters 2 bytes, and 4 for gradients, if several GPUs sum those of a stage."""
    gathered = [needs(in_stages(gpus), STAGES)["a"][0].gathered for gpus in (2, 4)]
    assert gathered == pytest.approx([2 * 0.6 * GB, 6 * 0.6 * GB])


def test_of_divided_experts_those_of_a_rank_stay_gathered() -> None:
    spec, mixture = spec_of(4), ModelSize(GB, 80 * GB, in_experts=3 * GB // 4)
    divided = spec.model_copy(update={"actor": spec.actor.model_copy(update={"expert_parallel_size": 4})})
    (whole,), (rank,) = (needs(each, {"actor": mixture})["a"] for each in (spec, divided))
    assert (whole.weights, whole.gathered) == (rank.weights, 16 / 7 * rank.gathered)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_are_counted_as_the_engine_cuts_them(tmp_path: Path, is_tied: bool, num_stages: int) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        write_tiny_model(tmp_path / "model", tie_word_embeddings=is_tied, num_hidden_layers=5)
    )
    training = in_stages(2).actor.model_copy(update={"pipeline_parallel_size": num_stages})
    of_policy, of_critic = (
        size_of(config, ModelSource("", trust_remote_code=False, has_output_layer=has_output), 0, training)
        for has_output in (True, False)
    )

    embedding = config.vocab_size * config.hidden_size
    copied = embedding if is_tied else 0
    assert sum(of_policy.stages) == of_policy.num_parameters + copied
    assert sum(of_critic.stages) == of_critic.num_parameters == of_policy.num_parameters - (embedding - copied)
    # Of two stages, the first has three layers and the embedding, the second two, the norm and the output layer.
    layer = (of_critic.num_parameters - embedding - config.hidden_size) // 5
    layers = {2: (3, 2), 3: (2, 2, 1)}[num_stages]
    ends = [embedding, *[0] * (num_stages - 2), embedding + config.hidden_size]
    assert of_policy.stages == tuple(layer * number + end for number, end in zip(layers, ends, strict=True))
    assert of_policy.largest_stage == of_critic.largest_stage == layers[0] * layer + embedding


def test_stages_of_a_rank_are_counted_together(tmp_path: Path) -> None:
    """Of five layers in four stages, stages 0 and 2 have three layers, and stages 1 and 3 two."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        write_tiny_model(tmp_path / "model", tie_word_embeddings=False, num_hidden_layers=5)
    )
    sizes = {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}
    training = in_stages(2).actor.model_copy(update=sizes)
    source = ModelSource("", trust_remote_code=False, has_output_layer=True)

    found = size_of(config, source, 0, training)

    embedding = config.vocab_size * config.hidden_size
    layer = (found.num_parameters - 2 * embedding - config.hidden_size) // 5
    assert found.stages == (3 * layer + embedding, 2 * layer + config.hidden_size + embedding)


@pytest.mark.parametrize("has_output_layer", [True, False])
def test_parameters_are_counted_without_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_output_layer: bool
) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    path = str(write_tiny_model(tmp_path / "model"))
    gpu = types.SimpleNamespace(total_memory=123)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    worker = TrainedWorker(WorkerContext("actor", 0, 1, 1, tmp_path / "log", 10.0), spec_of())
    worker.source = ModelSource(path, trust_remote_code=False, has_output_layer=has_output_layer)

    size = worker.size()

    kind = AutoModelForCausalLM if has_output_layer else AutoModel
    model = kind.from_pretrained(path)
    config = model.config
    counted = sum(parameter.numel() for parameter in model.parameters())
    shape = (config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    embeddings = config.vocab_size * config.hidden_size if has_output_layer else 0
    assert size == ModelSize(counted, 123, *shape, in_embeddings=embeddings, host="", host_bytes=host_bytes())
