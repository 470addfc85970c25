"""Adapters that change a weight by much less than bfloat16 keeps of it: the layer's result and the pushed weight show it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.train.fsdp.low_rank import LoRALinear
from ppojob_trainer.engines.train.fsdp.tensor_parallel import local
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh
from tests.unit.trainer.engines.fsdp_engines import policy_engine

ADAPTERS = LoRA(rank=16, alpha=32.0)
SMALL = 1e-5
"""Each number of B: about what ten steps of AdamW with the default learning rate make of it."""


def share_of(found: Tensor, expected: Tensor) -> float:
    """Return how much of a change is in what was found, which also has errors that do not depend on it."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found * expected).sum() / expected.square().sum())


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layers_result_has_all_of_a_small_adapter(has_bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(256, 256, bias=has_bias)
    nn.init.normal_(linear.weight, std=0.02)
    linear.requires_grad_(False)
    layer = LoRALinear.of(linear, ADAPTERS)
    nn.init.kaiming_uniform_(layer.lora_A, a=5**0.5)
    with torch.no_grad():
        layer.lora_B.copy_(SMALL * torch.randn_like(layer.lora_B).sign())
    layer.bfloat16()
    inputs = torch.randn(2, 2048, 256).bfloat16()
    exact = {name: value.detach().double() for name, value in layer.named_parameters()}
    added = 2.0 * (inputs.double() @ exact["lora_A"].T) @ exact["lora_B"].T
    base = inputs.double() @ exact["weight"].T + exact.get("bias", 0.0)

    found = layer(inputs).double() - base

    # The nearest bfloat16 is up to 1/256 away, and the adapter adds a tenth of that.
    assert added.abs().mean() < base.abs().mean() / 1000
    assert share_of(found, added) == pytest.approx(1, abs=0.1)


def test_pushed_weights_have_all_of_a_small_adapter(parallel: ParallelMesh, model_path: Path) -> None:
    actor = ActorModel(path=str(model_path), lora=ADAPTERS)
    engine = policy_engine(parallel, actor, ActorSpec(), AlgorithmSpec(), total_steps=1, seed=5, dtype=torch.bfloat16)
    model = engine.module.language_model
    adapted = {name: part for name, part in model.named_modules() if isinstance(part, LoRALinear)}
    expected: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, layer in adapted.items():
            up, down = local(layer.lora_B), local(layer.lora_A)
            up.copy_(SMALL * torch.randn_like(up).sign())
            expected[name] = 2.0 * up @ down

    weights = ShardedWeights(model, torch.bfloat16)
    pushed = dict(zip((spec.name for spec in weights.specs()), weights.gather(), strict=True))

    assert len(expected) == 14
    changes = [pushed[f"{name}.weight"].float() - layer.weight.float() for name, layer in adapted.items()]
    found, wanted = (torch.cat([one.flatten() for one in many]) for many in (changes, expected.values()))
    assert wanted.abs().mean() < SMALL
    assert share_of(found, wanted) == pytest.approx(1, abs=0.2)
