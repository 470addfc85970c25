"""Adapters on experts on a GPU against the same formulas in float64, with ranks that its grouped product does not take
as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.engines.train.fsdp import experts
from ppojob_trainer.engines.train.fsdp.lora import add_adapters, is_adapter
from tests.gpu.test_grouped_experts_on_cuda import NUM_EXPERTS, PER_TOKEN, ROUNDING, TOKENS, choices, distance
from tests.unit.trainer.engines.test_expert_adapter_products import merged
from tests.unit.trainer.engines.tiny_experts import tiny_experts

pytestmark = pytest.mark.gpu

FACTOR = 2.0
TARGETS = ["gate_proj", "up_proj", "down_proj"]


def adapted(rank: int, sizes: tuple[int, int], targets: list[str], family: str = "qwen3_moe") -> nn.Module:
    hidden_size, expert_size = sizes
    names = {"gpt_oss": ("num_local_experts", "intermediate_size")}.get(
        family, ("num_experts", "moe_intermediate_size")
    )
    shape = {names[0]: NUM_EXPERTS, names[1]: expert_size, "hidden_size": hidden_size}
    model = tiny_experts(torch.bfloat16, family, **shape)
    experts.add_counts(model)
    model.requires_grad_(False)
    layers = model.base_model.get_submodule("layers")
    add_adapters(model, layers, LoRA(rank=rank, alpha=FACTOR * rank, target_modules=targets))
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            nn.init.normal_(parameter, std=0.1)
    _, found = next(experts.expert_modules(model))
    # As FSDP gathers them.
    return found.bfloat16().cuda()


def results(module: nn.Module, given: list[Tensor], chosen: Tensor, outer: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of `given`: hidden states, weights, and what is trained."""
    output = experts.count_and_multiply(module, given[0], chosen, given[1])
    return [output, *torch.autograd.grad(output, given, outer)]


@pytest.mark.parametrize("targets", [TARGETS, ["up_proj"], ["down_proj"]], ids=str)
@pytest.mark.parametrize("sizes", [(64, 48), (256, 768)])
@pytest.mark.parametrize("rank", [1, 12, 16])
def test_they_are_those_in_float64_and_the_same_each_time(
    rank: int, sizes: tuple[int, int], targets: list[str]
) -> None:
    module, chosen = adapted(rank, sizes, targets), choices()
    hidden = torch.randn(TOKENS, sizes[0], device="cuda").bfloat16().requires_grad_()
    weights = torch.rand(TOKENS, PER_TOKEN, device="cuda").requires_grad_()
    outer = torch.randn(TOKENS, sizes[0], device="cuda").bfloat16()
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    given = [hidden, weights, *trained.values()]

    found = results(module, given, chosen, outer)

    exact_given = [one.detach().double().requires_grad_() for one in given]
    parts = dict(zip(trained, exact_given[2:], strict=True))
    expected = formula(module, parts, chosen, *exact_given[:2])
    gradients = torch.autograd.grad(expected, exact_given, outer.double())
    for name, ours, exact in zip(["output", "hidden", "weights", *trained], found, [expected, *gradients], strict=True):
        assert distance(ours, exact) < 3 * ROUNDING[torch.bfloat16], name
    for first, second in zip(found, results(module, given, chosen, outer), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("sizes", [(64, 48), (2880, 2880)])
@pytest.mark.parametrize("rank", [1, 16])
def test_those_of_gpt_oss_are_transformers_experts_in_float64(rank: int, sizes: tuple[int, int]) -> None:
    targets = ["gate_up_proj", "down_proj"]
    module, chosen = adapted(rank, sizes, targets, "gpt_oss"), choices()
    # Small: rounding would move many large gates over the limit of the clamp, where their gradient ends.
    hidden = (torch.randn(TOKENS, sizes[0], device="cuda") / sizes[0] ** 0.5).bfloat16().requires_grad_()
    weights = torch.rand(TOKENS, PER_TOKEN, device="cuda").requires_grad_()
    outer = torch.randn(TOKENS, sizes[0], device="cuda").bfloat16()
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    given = [hidden, weights, *trained.values()]

    found = results(module, given, chosen, outer)

    module.double().config._experts_implementation = "eager"  # type: ignore[union-attr]
    exact_given = [one.detach().double().requires_grad_() for one in given[:2]]
    expected = functional_call(module, merged(module, targets, FACTOR), (exact_given[0], chosen, exact_given[1]))
    exact_given += [one for one in module.parameters() if one.requires_grad]
    gradients = torch.autograd.grad(expected, exact_given, outer.double())
    for name, ours, exact in zip(["output", "hidden", "weights", *trained], found, [expected, *gradients], strict=True):
        assert distance(ours, exact) < 3 * ROUNDING[torch.bfloat16], name


def test_experts_without_a_row_get_gradients_of_zeros() -> None:
    module = adapted(12, (64, 48), TARGETS)
    hidden = torch.randn(8, 64, device="cuda").bfloat16().requires_grad_()
    chosen, weights = torch.full((8, 1), 3, device="cuda"), torch.ones(8, 1, device="cuda")
    experts.count_and_multiply(module, hidden, chosen, weights).sum().backward()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            others = torch.cat([parameter.grad[:3], parameter.grad[4:]])
            assert not others.any(), name
            assert parameter.grad[3].any(), name


def formula(module: nn.Module, parts: dict[str, Tensor], chosen: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
    """One product for each expert, of all tokens."""
    total = torch.zeros_like(hidden)
    gate_up, down = (module.get_parameter(name).detach().double() for name in ("gate_up_proj", "down_proj"))

    def linear(tokens: Tensor, weight: Tensor, fused: str, name: str, expert: int) -> Tensor:
        output = functional.linear(tokens, weight)
        first, second = (parts.get(f"adapters.{fused}.{name}.lora_{matrix}") for matrix in "AB")
        if first is None or second is None:
            return output
        return output + FACTOR * functional.linear(functional.linear(tokens, first[expert]), second[expert])

    for expert in range(len(gate_up)):
        of_gate, of_up = gate_up[expert].chunk(2)
        gate = linear(hidden, of_gate, "gate_up_proj", "gate_proj", expert)
        up = linear(hidden, of_up, "gate_up_proj", "up_proj", expert)
        result = linear(functional.silu(gate) * up, down[expert], "down_proj", "down_proj", expert)
        total = total + result * ((chosen == expert) * weights).sum(dim=1, keepdim=True)
    return total
