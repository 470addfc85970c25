"""Adapters on the experts of a model: their names, what they begin with, and what is sent and exported of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.errors import ModelUnsupportedError
from ppojob_trainer.engines.train.fsdp import expert_blocks
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.flops import model_flops
from ppojob_trainer.engines.train.fsdp.lora import initial_adapters, is_adapter
from ppojob_trainer.engines.train.fsdp.low_rank import LoRALinear
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.objectives import UpdateResult
from ppojob_trainer.maths.rounding import round_stochastically
from ppojob_trainer.models.support import FAMILIES, Support
from ppojob_trainer.protocol import Keys
from tests.unit.trainer.engines.fsdp_engines import policy_engine
from tests.unit.trainer.engines.option_ranks import fill_second_matrices
from tests.unit.trainer.engines.tiny_experts import (
    EXPERT_SIZE,
    MIXTURES,
    NUM_EXPERTS,
    PER_TOKEN,
    save_tiny_experts,
)
from tests.unit.trainer.engines.tiny_llama import make_batch
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part

HIDDEN = 48
RANK, FACTOR = 3, 4.0
NAMES = {"mixtral": ("w1", "w3", "w2"), "gpt_oss": ("gate_up_proj", "down_proj")}
WITH_ADAPTERS = [name for name in MIXTURES if FAMILIES[name].lora is Support.TESTED]
USUAL = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(params=WITH_ADAPTERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_policy(parallel: ParallelMesh, path: Path, targets: list[str], **model: Any) -> FSDPEngine:
    lora = LoRA(rank=RANK, alpha=FACTOR * RANK, target_modules=targets)
    actor = ActorModel(path=str(path), lora=lora, **model)
    training = ActorSpec(learning_rate=1e-2, max_tokens_per_gpu=1000)
    return policy_engine(parallel, actor, training, AlgorithmSpec(), total_steps=9, seed=5, dtype=torch.float32)


def sent(engine: FSDPEngine) -> dict[str, Tensor]:
    weights = ShardedWeights(engine.module.language_model, torch.float32)
    return {spec.name: tensor.clone() for spec, tensor in zip(weights.specs(), weights.gather(), strict=True)}


def test_the_names_are_those_of_the_checkpoints_linear_layers(
    parallel: ParallelMesh, family: str, tmp_path: Path
) -> None:
    """Also of dense layers and shared experts; without names, all layers have adapters."""
    names = NAMES.get(family, USUAL)
    path = save_tiny_experts(tmp_path, family=family)
    some, everything = (make_policy(parallel, path, targets) for targets in ([*names], []))
    mixture = MIXTURES[family]
    in_experts = [name for name, part in some.module.named_parameters() if is_adapter(name) and part.ndim == 3]
    assert len(in_experts) == 2 * len(names) * mixture.num_sparse
    # Biases of experts have none.
    assert not any("bias" in name for name in in_experts)
    dense = [name for name, part in some.module.named_modules() if isinstance(part, LoRALinear)]
    # Three layers in each MLP of a dense layer, and in the shared experts.
    num_shared = mixture.num_sparse if family == "deepseek_v3" else 0
    assert len(dense) == 3 * (len(mixture.dense) + num_shared)
    of_all = {name for name, _ in everything.module.named_parameters() if is_adapter(name)}
    assert of_all > {name for name, _ in some.module.named_parameters() if is_adapter(name)}
    assert any("self_attn" in name for name in of_all)


@pytest.mark.parametrize("target", ["experts", "gate_up_proj", "w1"])
def test_names_that_no_checkpoint_has_are_refused(parallel: ParallelMesh, tmp_path: Path, target: str) -> None:
    says = rf"\['{target}'\] are no linear layers of the decoder layers: there are down_proj, gate_proj, k_proj, "
    with pytest.raises(ModelUnsupportedError, match=says):
        make_policy(parallel, save_tiny_experts(tmp_path), [target, "q_proj"])


def test_they_begin_as_linear_layers_do(parallel: ParallelMesh, tmp_path: Path) -> None:
    policy = make_policy(parallel, save_tiny_experts(tmp_path), [*USUAL])
    drawn = dict(initial_adapters(policy.module, seed=5))
    for name, parameter in policy.module.named_parameters():
        if not is_adapter(name):
            continue
        assert torch.equal(parameter.full_tensor(), drawn[name])  # type: ignore[operator]
        if name.endswith("lora_A"):
            # Uniform within 1 / sqrt(inputs), each expert with other numbers.
            bound = 1 / math.sqrt(parameter.shape[-1])
            assert 0.9 * bound < drawn[name].abs().max() <= bound
            assert drawn[name].ndim == 2 or not torch.equal(drawn[name][0], drawn[name][1])
        else:
            assert not drawn[name].any()


def test_the_reference_stays_the_base_model(parallel: ParallelMesh, tmp_path: Path) -> None:
    path, batch = save_tiny_experts(tmp_path), make_batch(8)
    policy = make_policy(parallel, path, [*USUAL])
    before = policy.forward(batch).padded(Keys.OLD_LOG_PROBS)
    assert torch.equal(before, policy.forward(batch, with_adapters=False).padded(Keys.OLD_LOG_PROBS))
    policy.update(batch)
    assert (policy.forward(batch).padded(Keys.OLD_LOG_PROBS) - before).abs().max() > 1e-3
    assert torch.equal(before, policy.forward(batch, with_adapters=False).padded(Keys.OLD_LOG_PROBS))


def test_what_is_sent_and_exported_is_the_base_plus_the_products(
    parallel: ParallelMesh, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_experts(tmp_path / "model", family=family)
    names = NAMES.get(family, USUAL)
    policy = make_policy(parallel, path, [*names])
    base = sent(policy)
    policy.update(make_batch(8))
    policy.export(tmp_path / "export")

    weights = sent(policy)
    adapters = load_file(tmp_path / "export" / "adapter" / "adapter_model.safetensors")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    config = json.loads((tmp_path / "export" / "adapter" / "adapter_config.json").read_text())
    targets = sorted(names) if family != "gpt_oss" else []
    parameters = [] if family != "gpt_oss" else ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert (config["target_modules"], config.get("target_parameters", [])) == (targets, parameters)
    changed = {name for name in base if not torch.equal(base[name], weights[name])}
    products = dict(products_of(adapters))
    assert changed == products.keys()
    assert MIXTURES[family].of_hub in str(changed)
    for name, product in products.items():
        torch.testing.assert_close(weights[name], base[name] + FACTOR * product, atol=1e-6, rtol=1e-6)
    for name, tensor in weights.items():
        dtype = exported[name].dtype
        expected = round_stochastically(tensor, dtype) if name in changed else tensor.to(dtype)
        assert torch.equal(exported[name], expected)

    # The same in smaller blocks.
    monkeypatch.setattr(expert_blocks, "BLOCK_BYTES", 4 * 2 * EXPERT_SIZE * HIDDEN * 4)
    in_blocks = sent(policy)
    assert list(in_blocks) == list(weights)
    for name, tensor in weights.items():
        assert torch.equal(in_blocks[name], tensor), name


def products_of(adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield B A by the name of its weight; of fused experts as peft's `ParamWrapper` has them, and transposed."""
    for name, down in adapters.items():
        layer, found, _ = name.removeprefix("base_model.model.").rpartition(".lora_A.weight")
        if not found:
            continue
        up = adapters[name.replace(".lora_A.", ".lora_B.")]
        if layer.endswith((".experts", ".experts.base_layer")):
            assert down.shape[0] == up.shape[1] == RANK * NUM_EXPERTS
            of_experts = up.reshape(len(up), RANK, NUM_EXPERTS), down.reshape(NUM_EXPERTS, RANK, -1)
            parameter = "gate_up_proj" if layer.endswith(".base_layer") else "down_proj"
            yield f"{layer.removesuffix('.base_layer')}.{parameter}", torch.einsum("ore,eri->eio", *of_experts)
        else:
            assert down.shape[0] == up.shape[1] == RANK
            yield f"{layer}.weight", up @ down


def test_one_fused_parameter_alone_is_not_wrapped_twice(parallel: ParallelMesh, tmp_path: Path) -> None:
    policy = make_policy(parallel, save_tiny_experts(tmp_path, family="gpt_oss"), ["gate_up_proj"])
    shapes = ShardedWeights(policy.module.language_model).adapter_shapes()
    assert {name for name in shapes if ".layers.1." in name} == {
        f"model.layers.1.mlp.experts.lora_{part}" for part in "AB"
    }


@pytest.mark.parametrize("number", [0, 1, -1])
def test_transformers_computes_the_same_with_what_is_sent(
    parallel: ParallelMesh, family: str, number: int, tmp_path: Path
) -> None:
    path, batch = save_tiny_experts(tmp_path, family=family), make_batch(8)
    policy = make_policy(parallel, path, ["o_proj", NAMES.get(family, USUAL)[number]])
    for _ in range(3):
        policy.update(batch)
    save_file(sent(policy), path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        logits = model(**padded_inputs(batch)).logits
    responses = padded_responses(batch)
    log_p = torch.log_softmax(response_part(logits, responses.shape[1]) / 0.7, dim=-1)
    expected = log_p.gather(-1, responses.unsqueeze(-1)).squeeze(-1) * batch.padded(Keys.RESPONSE_MASK)
    torch.testing.assert_close(policy.forward(batch).padded(Keys.OLD_LOG_PROBS), expected, atol=1e-4, rtol=1e-4)


def test_a_later_push_has_all_projections_of_all_experts(parallel: ParallelMesh, tmp_path: Path) -> None:
    """vLLM fuses them into one layer. Dense layers and shared experts of that name are sent, too."""
    policy = make_policy(parallel, save_tiny_experts(tmp_path, family="deepseek_v3"), ["up_proj"])
    specs = ShardedWeights(policy.module.language_model).specs()
    changing = {spec.name for spec in specs if not spec.is_frozen}
    parts = (".mlp.experts.", ".mlp.shared_experts.", ".0.mlp.")
    assert changing == {spec.name for spec in specs if any(part in spec.name for part in parts)}
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in changing


def test_operations_are_those_of_the_adapters_that_a_token_uses(parallel: ParallelMesh, tmp_path: Path) -> None:
    result = UpdateResult(1, 0, 0.0, num_tokens=10.0)
    path = save_tiny_experts(tmp_path)
    of_attention, of_both = (
        model_flops(make_policy(parallel, path, targets).module.backbone, result, 0)
        for targets in (["q_proj"], ["q_proj", *USUAL])
    )
    # Gate and up of an expert and of the dense layer take HIDDEN numbers and return EXPERT_SIZE or 64; down turns back.
    of_experts = 2 * PER_TOKEN * 3 * RANK * (HIDDEN + EXPERT_SIZE)
    of_dense = 3 * RANK * (HIDDEN + 64)
    assert of_both - of_attention == pytest.approx(6 * 10 * (of_experts + of_dense), rel=1e-9)


def test_the_table_of_families_says_that_these_are_tested() -> None:
    assert {*WITH_ADAPTERS} == MIXTURES.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_layers_compute_the_same(
    parallel: ParallelMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in test_engine_experts: torch's tracing and partitioning without Inductor's code."""
    path, batch = save_tiny_experts(tmp_path), make_batch(4, num_mini_batches=1)
    expected = make_policy(parallel, path, [])
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", dynamic=True))
    torch.compiler.reset()
    compiled = make_policy(parallel, path, [], compile=True)
    for policy in (expected, compiled):
        fill_second_matrices(policy)
    assert compiled.update(batch) == pytest.approx(expected.update(batch), rel=1e-4, abs=1e-6)
    references = [
        policy.forward(batch, with_adapters=False).padded(Keys.OLD_LOG_PROBS) for policy in (expected, compiled)
    ]
    torch.testing.assert_close(references[1], references[0], atol=1e-4, rtol=1e-4)
