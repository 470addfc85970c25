"""Adapters whose changes are far below the precision of bfloat16: a layer's results and pushed weights have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.fsdp import experts
from ppojob_trainer.engines.train.fsdp.low_rank import LoRAExperts, LoRALinear
from ppojob_trainer.engines.train.fsdp.tensor_parallel import local
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines.fsdp_engines import policy_engine
from tests.unit.trainer.engines.test_expert_adapter_products import HIDDEN, USUAL, adapted, loop
from tests.unit.trainer.engines.tiny_experts import NUM_EXPERTS, save_tiny_experts

ADAPTERS = LoRA(rank=16, alpha=32.0)
SMALL = 1e-5
"""Each number of B: about what ten steps of AdamW with the default learning rate make of it."""


def share_of(found: Tensor, expected: Tensor) -> float:
    """Return how much of a change is in what was found, which also has errors that do not depend on it."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found * expected).sum() / expected.square().sum())


def share_in_a_layer(device: str, *, has_bias: bool, compiles: bool = False) -> float:
    """Return how much of a small adapter is in the results of a layer in bfloat16."""
    torch.manual_seed(1)
    linear = nn.Linear(256, 256, bias=has_bias)
    nn.init.normal_(linear.weight, std=0.02)
    linear.requires_grad_(False)
    layer = LoRALinear.of(linear, ADAPTERS)
    nn.init.kaiming_uniform_(layer.lora_A, a=5**0.5)
    with torch.no_grad():
        layer.lora_B.copy_(SMALL * torch.randn_like(layer.lora_B).sign())
    layer.bfloat16().to(device)
    inputs = torch.randn(2, 2048, 256).bfloat16().to(device)
    exact = {name: value.detach().double() for name, value in layer.named_parameters()}
    added = 2.0 * (inputs.double() @ exact["lora_A"].T) @ exact["lora_B"].T
    base = inputs.double() @ exact["weight"].T + exact.get("bias", 0.0)
    # The nearest bfloat16 is up to 1/256 away.
    assert added.abs().mean() < base.abs().mean() / 1000
    # With what follows a layer in a model, a compiler may join its sum.
    compute = torch.compile(lambda rows: layer(rows).relu()) if compiles else lambda rows: layer(rows).relu()
    found = compute(inputs)
    return share_of((found.double() - base.relu())[base > 0], added[base > 0])


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layers_result_has_all_of_a_small_adapter(has_bias: bool) -> None:
    assert share_in_a_layer("cpu", has_bias=has_bias) == pytest.approx(1, abs=0.1)


def test_there_may_be_no_token() -> None:
    layer = LoRALinear.of(nn.Linear(6, 5), ADAPTERS)
    nn.init.ones_(layer.lora_A)
    nn.init.ones_(layer.lora_B)

    assert layer(torch.empty(1, 0, 6)).shape == (1, 0, 5)


def test_there_may_be_no_expert_to_merge() -> None:
    _, module = adapted([*USUAL], rank=8)
    weight = module.get_parameter("gate_up_proj")[:0].detach()
    of_experts = module.get_submodule("adapters.gate_up_proj")
    assert isinstance(of_experts, LoRAExperts)

    assert of_experts.merge_into(weight, torch.bfloat16, lambda part: part[:0]).shape == weight.shape


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function")
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_results_of_experts_have_all_of_small_adapters(compiles: bool) -> None:
    _, module = adapted([*USUAL], rank=8)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("lora_B"):
                parameter.mul_(1e-4)
    module.bfloat16()
    hidden = torch.randn(32_768, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    first = torch.arange(len(hidden))
    chosen = torch.stack([first % NUM_EXPERTS, (first + 1) % NUM_EXPERTS], dim=1)
    weights = torch.full(chosen.shape, 0.5)

    compute = torch.compile(experts.count_and_multiply) if compiles else experts.count_and_multiply
    found = compute(module, hidden, chosen, weights)

    module.double()
    with_adapters, base = (loop(module, one, hidden.double(), chosen, weights.double()) for one in ([*USUAL], []))
    assert (with_adapters - base).abs().mean() < base.abs().mean() / 1000
    assert share_of(found.double() - base, with_adapters - base) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("has_experts", [False, True])
def test_pushed_weights_have_all_of_a_small_adapter(
    parallel: ParallelMesh, model_path: Path, tmp_path: Path, has_experts: bool
) -> None:
    path = save_tiny_experts(tmp_path / "experts") if has_experts else model_path
    actor = ActorModel(path=str(path), lora=ADAPTERS)
    engine = policy_engine(parallel, actor, ActorSpec(), AlgorithmSpec(), total_steps=1, seed=5, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if name.endswith("lora_B"):
                local(parameter).copy_(SMALL * torch.randn_like(local(parameter)).sign())

    def pushed(dtype: torch.dtype) -> Tensor:
        weights = ShardedWeights(engine.module.language_model, dtype)
        return torch.cat([tensor.float().flatten() for tensor in weights.gather()])

    exact, found = pushed(torch.float32), pushed(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if name.endswith("lora_B"):
                local(parameter).zero_()
    base = pushed(torch.bfloat16)
    assert (exact - base).abs().mean() < base.abs().mean() / 1000
    assert share_of(found - base, exact - base) == pytest.approx(1, abs=0.2)
