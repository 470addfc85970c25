"""Adapters: the model begins as it was, only they are trained, and everybody else sees the sum."""

from __future__ import annotations

import errno
import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA, Offload, TrainedModel
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.errors import CheckpointUnreadableError, CheckpointUnwritableError, ModelUnsupportedError
from ppojob_trainer.engines.train.fsdp import lora as lora_module
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.flops import model_flops
from ppojob_trainer.engines.train.fsdp.lora import adapters_off, is_adapter
from ppojob_trainer.engines.train.fsdp.low_rank import LoRALinear
from ppojob_trainer.engines.train.fsdp.tensor_parallel import local
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.objectives import UpdateResult
from ppojob_trainer.maths.rounding import round_stochastically
from ppojob_trainer.protocol import DataProto, Keys
from tests.unit.trainer.engines.fsdp_engines import critic_engine, policy_engine, reference_engine
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part

ADAPTERS = LoRA(rank=4, alpha=12.0)


def make_policy(parallel: ParallelMesh, path: Path, lora: LoRA | None = ADAPTERS, **model: Any) -> FSDPEngine:
    training = ActorSpec(learning_rate=1e-2, max_tokens_per_gpu=1000)
    actor = ActorModel(path=str(path), lora=lora, **model)
    return policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=9, seed=5, dtype=torch.float32)


def log_probs(engine: FSDPEngine, batch: DataProto) -> torch.Tensor:
    return engine.forward(batch).padded(Keys.OLD_LOG_PROBS)


def whole_weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    weights = ShardedWeights(engine.module.language_model, torch.float32)
    return {spec.name: tensor.clone() for spec, tensor in zip(weights.specs(), weights.gather(), strict=True)}


def test_a_layer_computes_the_sum_and_trains_the_adapter_alone() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(6, 5)
    linear.requires_grad_(False)
    layer = LoRALinear.of(deepcopy(linear), LoRA(rank=2, alpha=3.0))
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    inputs, outer = torch.randn(7, 6), torch.randn(7, 5)
    dense = (linear.weight + 1.5 * layer.lora_B @ layer.lora_A).detach().requires_grad_()
    expected = functional.linear(inputs, dense, linear.bias)
    torch.testing.assert_close(layer(inputs), expected)
    torch.autograd.backward((layer(inputs) * outer).sum())
    (of_dense,) = torch.autograd.grad((expected * outer).sum(), dense)
    torch.testing.assert_close(layer.lora_A.grad, 1.5 * layer.lora_B.T @ of_dense)
    torch.testing.assert_close(layer.lora_B.grad, 1.5 * of_dense @ layer.lora_A.T)
    assert layer.weight.grad is None
    with adapters_off(layer):
        torch.testing.assert_close(layer(inputs), linear(inputs))


def test_it_begins_as_the_model_and_the_reference_stays_so(
    parallel: ParallelMesh, model_path: Path, batch: DataProto
) -> None:
    plain = log_probs(make_policy(parallel, model_path, None), batch)
    engine = make_policy(parallel, model_path)
    assert torch.equal(log_probs(engine, batch), plain)
    engine.update(batch)
    assert (log_probs(engine, batch) - plain).abs().max() > 1e-3
    reference = engine.forward(batch, with_adapters=False)
    assert torch.equal(reference.padded(Keys.OLD_LOG_PROBS), plain)


def test_only_adapters_have_gradients_and_moments(parallel: ParallelMesh, model_path: Path, batch: DataProto) -> None:
    engine = make_policy(parallel, model_path)
    before = {name: local(value.detach()).clone() for name, value in engine.module.named_parameters()}
    engine.update(batch)
    changed = {name for name, value in engine.module.named_parameters() if not torch.equal(local(value), before[name])}
    assert changed == {name for name in before if is_adapter(name)}
    # Seven linear layers in each of two decoder layers, A and B.
    assert len(changed) == len(engine.optimizer.adamw.state) == 28


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_adapters", [True, False])
def test_a_rank_that_has_frozen_weights_whole_computes_with_them_and_no_copy(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, has_adapters: bool, dtype: torch.dtype
) -> None:
    """Also if the file has another dtype: this one has float32."""
    if has_adapters:
        actor = ActorModel(path=str(model_path), lora=ADAPTERS)
        engine = policy_engine(parallel, actor, ActorSpec(), AlgorithmSpec(), total_steps=1, dtype=dtype)
    else:
        engine = reference_engine(parallel, str(model_path), max_tokens_per_gpu=64, dtype=dtype)

    def places() -> dict[str, int]:
        named = engine.module.named_parameters()
        return {name: local(value).data_ptr() for name, value in named if not value.requires_grad}

    idle, computing = places(), []
    layer = engine.module.get_submodule("language_model.model.layers.1.mlp")
    layer.register_forward_hook(lambda *_: computing.append(places()))
    engine.forward(batch)
    assert len(idle) > 10
    assert computing
    assert all(one == idle for one in computing)


def test_the_rollout_gets_the_sum(parallel: ParallelMesh, model_path: Path, batch: DataProto) -> None:
    engine = make_policy(parallel, model_path)
    engine.update(batch)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    assert set(whole_weights(engine)) == {name for name, _ in model.named_parameters()}
    model.load_state_dict(whole_weights(engine), strict=False)
    with torch.no_grad():
        logits = model(**padded_inputs(batch)).logits
    responses = padded_responses(batch)
    log_p = torch.log_softmax(response_part(logits, responses.shape[1]) / 0.7, dim=-1)
    expected = log_p.gather(-1, responses.unsqueeze(-1)).squeeze(-1) * batch.padded(Keys.RESPONSE_MASK)
    torch.testing.assert_close(log_probs(engine, batch), expected, atol=1e-4, rtol=1e-4)


def test_adapters_that_the_storage_refuses_are_named_and_there_is_no_index(
    parallel: ParallelMesh, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = make_policy(parallel, model_path)
    monkeypatch.setattr(lora_module, "durable", SimpleNamespace(sync=full))

    with pytest.raises(
        CheckpointUnwritableError, match=r"export cannot be written: rank 0: \[Errno 28\] No space left"
    ):
        engine.export(tmp_path / "export")

    assert not (tmp_path / "export" / "config.json").exists()


def test_the_export_is_the_sum_with_the_adapters_beside_it(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path
) -> None:
    engine = make_policy(parallel, model_path, LoRA(rank=4, alpha=12.0, target_modules=["q_proj", "down_proj"]))
    engine.update(batch)
    engine.export(tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto").state_dict()
    for name, tensor in whole_weights(engine).items():
        is_adapted = name.endswith(("q_proj.weight", "down_proj.weight"))
        rounded = round_stochastically(tensor, torch.bfloat16) if is_adapted else tensor.bfloat16()
        assert torch.equal(exported[name], rounded)
    config = json.loads((tmp_path / "export" / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 12.0)
    file = tmp_path / "export" / "adapter" / "adapter_model.safetensors"
    adapters = load_file(file)
    assert len(adapters) == 8
    for name, value in engine.module.language_model.named_parameters():
        if is_adapter(name):
            assert torch.equal(adapters[f"base_model.model.{name}.weight"], value.full_tensor())  # type: ignore[operator]
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    down = adapters["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    assert down.shape == (48, 4)
    assert down.abs().max() > 0


def test_a_run_resumes_exactly_from_adapters_alone(
    parallel: ParallelMesh, model_path: Path, batch: DataProto, tmp_path: Path
) -> None:
    offload = Offload(parameters=True, optimizer=True)
    saved, resumed = make_policy(parallel, model_path), make_policy(parallel, model_path, offload=offload)
    saved.update(batch)
    saved.save(tmp_path / "step")
    names = FileSystemReader(tmp_path / "step").read_metadata().state_dict_metadata
    assert {is_adapter(name) for name in names if name.startswith("model.")} == {True}
    resumed.restore(tmp_path / "step")
    assert resumed.update(batch) == saved.update(batch)
    assert torch.equal(log_probs(resumed, batch), log_probs(saved, batch))


def test_checkpoints_with_and_without_adapters_are_not_mixed_up(
    parallel: ParallelMesh, model_path: Path, tmp_path: Path
) -> None:
    whole, adapted = make_policy(parallel, model_path, None), make_policy(parallel, model_path)
    whole.save(tmp_path / "whole")
    adapted.save(tmp_path / "adapted")
    for engine, other in ((whole, "adapted"), (adapted, "whole")):
        with pytest.raises(CheckpointUnreadableError, match=f"{other} cannot be read into this model"):
            engine.restore(tmp_path / other)


def test_targets_that_do_not_exist_are_refused(parallel: ParallelMesh, model_path: Path) -> None:
    with pytest.raises(ModelUnsupportedError, match=r"\['query'\] are no linear layers .* there are down_proj, "):
        make_policy(parallel, model_path, LoRA(target_modules=["query", "q_proj"]))


def test_a_critic_trains_its_value_head_too(parallel: ParallelMesh, model_path: Path, batch: DataProto) -> None:
    model, training = TrainedModel(lora=ADAPTERS), CriticSpec(learning_rate=1e-2, max_tokens_per_gpu=1000)
    critic = critic_engine(parallel, model, str(model_path), training, total_steps=9, seed=1, dtype=torch.float32)
    trained = {name for name, value in critic.module.named_parameters() if value.requires_grad}
    assert {name for name in trained if not is_adapter(name)} == {"value_head.weight", "value_head.bias"}
    mask = batch.ragged(Keys.RESPONSE_MASK)
    returns = mask.with_values(0.8 * mask.values)
    wanted = batch.with_fields({Keys.RETURNS: returns, **critic.forward(batch).columns})
    losses = [critic.update(wanted)["critic/vf_loss"] for _ in range(5)]
    assert losses[-1] < 0.3 * losses[0]


def test_frozen_weights_have_no_gradient_of_their_own_to_count(parallel: ParallelMesh, model_path: Path) -> None:
    result = UpdateResult(1, 0, 0.0, num_tokens=10.0, num_policy_tokens=5.0)
    backbones = [make_policy(parallel, model_path, lora).module.backbone for lora in (None, ADAPTERS)]
    matrices, adapters = (
        sum(value.numel() for name, value in backbones[1].get_submodule("layers").named_parameters() if kind(name))
        for kind in (lambda name: not is_adapter(name), is_adapter)
    )
    output = 97 * 48
    whole, adapted = (model_flops(backbone, result, 97) for backbone in backbones)
    assert whole == 6 * (10 * matrices + 5 * output)
    assert adapted == 4 * (10 * matrices + 5 * output) + 6 * 10 * adapters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_adapters", [True, False])
def test_frozen_weights_are_loaded_in_the_computations_dtype_from_any_file(
    parallel: ParallelMesh, model_path: Path, tmp_path: Path, dtype: torch.dtype, has_adapters: bool
) -> None:
    path = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).save_pretrained(path)
    if has_adapters:
        actor = ActorModel(path=str(path), lora=ADAPTERS)
        engine = policy_engine(parallel, actor, ActorSpec(), AlgorithmSpec(), total_steps=1, dtype=torch.bfloat16)
    else:
        engine = reference_engine(parallel, str(path), max_tokens_per_gpu=64, dtype=torch.bfloat16)
    named = list(engine.module.named_parameters())
    assert {value.dtype for name, value in named if not is_adapter(name)} == {torch.bfloat16}
    assert {value.dtype for name, value in named if is_adapter(name)} == ({torch.float32} if has_adapters else set())
