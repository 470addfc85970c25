"""The kernels of experts on a GPU against the same formulas in float64, and the same numbers each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ppojob_trainer.engines.train.fsdp import experts
from ppojob_trainer.engines.train.fsdp.expert_gates import Gate
from ppojob_trainer.engines.train.fsdp.expert_rows import Rows, collect, spread
from tests.unit.trainer.engines.test_expert_gates import given_rows, module_of, results, theirs
from tests.unit.trainer.engines.tiny_experts import tiny_experts

pytestmark = pytest.mark.gpu

TOKENS, NUM_EXPERTS, PER_TOKEN = 1000, 32, 4
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5}


def distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())


def choices() -> Tensor:
    generator = torch.Generator("cuda").manual_seed(2)
    return torch.rand(TOKENS, NUM_EXPERTS, generator=generator, device="cuda").topk(PER_TOKEN).indices


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [8, 200, 2048, 7168])
def test_sums_and_gradients_are_those_of_indexing(dtype: torch.dtype, size: int) -> None:
    keys = choices()
    # As on a rank that owns half of the experts; some tokens have no row.
    num_keys = NUM_EXPERTS // 2
    rows = Rows.sorted_by(keys.clamp(max=num_keys), num_keys).first(int((keys < num_keys).sum()))
    assert rows.choices.tolist() == sorted(rows.choices.tolist(), key=lambda at: (int(keys.flatten()[at]), at))
    tokens = torch.randn(TOKENS, size, device="cuda").to(dtype).requires_grad_()
    outer = torch.randn(TOKENS, size, device="cuda").to(dtype)
    found = collect(spread(tokens, rows), rows)
    (gradient,) = torch.autograd.grad(found, tokens, outer)
    number = (keys < num_keys).sum(dim=1, keepdim=True)
    assert (number == 0).any()
    assert distance(found, tokens.detach().double() * number) < ROUNDING[dtype]
    assert distance(gradient, outer.double() * number) < ROUNDING[dtype]


@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(64, 48), (256, 768)])
def test_experts_are_those_in_float64_and_the_same_each_time(sizes: tuple[int, int], of_weights: torch.dtype) -> None:
    hidden_size, expert_size = sizes
    shape: dict[str, Any] = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": expert_size}
    model = tiny_experts(torch.bfloat16, hidden_size=hidden_size, **shape)
    experts.add_counts(model)
    _, module = next(experts.expert_modules(model))
    module.cuda()
    chosen = choices()
    hidden = torch.randn(TOKENS, hidden_size, device="cuda").bfloat16().requires_grad_()
    weights = torch.rand(TOKENS, PER_TOKEN, device="cuda").to(of_weights).requires_grad_()
    outer = torch.randn(TOKENS, hidden_size, device="cuda").bfloat16()
    given = [hidden, weights, *module.parameters()]

    output = experts.count_and_multiply(module, hidden, chosen, weights)
    found = [output, *torch.autograd.grad(output, given, outer)]

    exact_given = [one.detach().double().requires_grad_() for one in given]
    expected = formula(chosen, *exact_given)
    gradients = torch.autograd.grad(expected, exact_given, outer.double())
    for ours, exact in zip(found, [expected, *gradients], strict=True):
        assert distance(ours, exact) < 2 * ROUNDING[torch.bfloat16]
    again = experts.count_and_multiply(module, hidden, chosen, weights)
    for first, second in zip(found, [again, *torch.autograd.grad(again, given, outer)], strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("sizes", [(64, 48), (2880, 2880)])
def test_those_of_gpt_oss_are_transformers_experts_in_float64(sizes: tuple[int, int]) -> None:
    hidden_size, expert_size = sizes
    shape = {"num_local_experts": NUM_EXPERTS, "intermediate_size": expert_size, "hidden_size": hidden_size}
    model = tiny_experts(torch.bfloat16, "gpt_oss", **shape)
    experts.add_counts(model)
    _, module = next(experts.expert_modules(model))
    module.cuda()
    chosen = choices()
    # Small: rounding would move many large gates over the limit of the clamp, where their gradient ends.
    hidden = (torch.randn(TOKENS, hidden_size, device="cuda") / hidden_size**0.5).bfloat16().requires_grad_()
    weights = torch.rand(TOKENS, PER_TOKEN, device="cuda").bfloat16().requires_grad_()
    outer = torch.randn(TOKENS, hidden_size, device="cuda").bfloat16()
    given = [hidden, weights, *module.parameters()]
    output = experts.count_and_multiply(module, hidden, chosen, weights)
    found = [output, *torch.autograd.grad(output, given, outer)]
    again = experts.count_and_multiply(module, hidden, chosen, weights)
    for first, second in zip(found, [again, *torch.autograd.grad(again, given, outer)], strict=True):
        assert torch.equal(first, second)

    module.double().config._experts_implementation = "eager"  # type: ignore[union-attr]
    exact_given = [one.detach().double().requires_grad_() for one in given[:2]]
    expected = module(exact_given[0], chosen, exact_given[1])
    gradients = torch.autograd.grad(expected, [*exact_given, *module.parameters()], outer.double())
    names = ["output", "hidden", "weights", *(name for name, _ in module.named_parameters())]
    for name, ours, exact in zip(names, found, [expected, *gradients], strict=True):
        assert distance(ours, exact) < 2 * ROUNDING[torch.bfloat16], name


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [8, 200, 2880])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gates_are_those_of_transformers_in_float64(family: str, dtype: torch.dtype, size: int, has_bias: bool) -> None:
    module, given = module_of(family), given_rows(dtype, size, has_bias=has_bias, device="cuda")
    found, again = results(module, given), results(module, given)
    for name, exact in theirs(module, given).items():
        assert found[name].dtype == dtype
        assert distance(found[name], exact) < ROUNDING[dtype], name
        assert torch.equal(found[name], again[name]), name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_gate_of_nan_is_nan(family: str) -> None:
    gate = Gate.of(module_of(family))
    assert gate is not None
    ends = torch.ones(1, dtype=torch.int32, device="cuda")
    rows = torch.full((1, 16), torch.nan, device="cuda")
    assert gate.apply(rows, torch.ones(1, device="cuda"), None, ends).isnan().all()


def formula(chosen: Tensor, hidden: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One product for each expert, of all tokens."""
    total = torch.zeros_like(hidden)
    for expert in range(len(gate_up)):
        gate, up = functional.linear(hidden, gate_up[expert]).chunk(2, dim=1)
        result = functional.linear(functional.silu(gate) * up, down[expert])
        total = total + result * ((chosen == expert) * weights).sum(dim=1, keepdim=True)
    return total
