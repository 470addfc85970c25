"""The gates of all families against transformers' own, with rows on both sides of gpt-oss's limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ppojob_trainer.engines.train.fsdp import experts
from ppojob_trainer.engines.train.fsdp.expert_gates import Gate
from tests.unit.trainer.engines.tiny_experts import MIXTURES, tiny_experts

SIZE = 24
COUNTS = [3, 0, 5, 1, 0, 9]
"""Rows of each expert."""


def module_of(family: str, **settings: Any) -> nn.Module:
    _, module = next(experts.expert_modules(tiny_experts(family=family, **settings)))
    return module


def given_rows(dtype: torch.dtype, size: int, *, has_bias: bool, device: str = "cpu") -> dict[str, Tensor | None]:
    """Products, weights and biases; of a bias, only some experts have rows."""
    generator = torch.Generator(device).manual_seed(3)
    rows = sum(COUNTS)

    def draw(*shape: int, std: float) -> Tensor:
        return (std * torch.randn(*shape, generator=generator, device=device)).to(dtype).requires_grad_()

    bias = draw(len(COUNTS), 2 * size, std=2.0) if has_bias else None
    return {"products": draw(rows, 2 * size, std=5.0), "weights": draw(rows, std=1.0), "bias": bias}


def results(module: Any, given: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the gated rows, and the gradients of what is given."""
    products, weights, bias = given.values()
    assert products is not None
    assert weights is not None
    gate = Gate.of(module)
    assert gate is not None
    gated = gate.apply(products, weights, bias, torch.tensor(COUNTS, device=products.device).cumsum(0).int())
    return with_gradients(gated, given)


def theirs(module: Any, given: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the same in float64, by transformers' formula."""
    exact = {name: None if one is None else one.detach().double().requires_grad_() for name, one in given.items()}
    both, weights, bias = exact.values()
    assert both is not None
    assert weights is not None
    if bias is not None:
        both = both + bias.repeat_interleave(torch.tensor(COUNTS, device=both.device), dim=0)
    return with_gradients(module._apply_gate(both) * weights.unsqueeze(1), exact)


def with_gradients(gated: Tensor, given: dict[str, Tensor | None]) -> dict[str, Tensor]:
    known = {name: one for name, one in given.items() if one is not None}
    outer = torch.linspace(-1, 2, gated.numel(), device=gated.device).view_as(gated).to(gated.dtype)
    return {"gated": gated.detach()} | dict(
        zip(known, torch.autograd.grad(gated, list(known.values()), outer), strict=True)
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_values_and_gradients_are_those_of_transformers(family: str, has_bias: bool) -> None:
    module, given = module_of(family), given_rows(torch.float32, SIZE, has_bias=has_bias)
    found = results(module, given)
    for name, expected in theirs(module, given).items():
        scale = expected.abs().max()
        assert scale > 0
        # Float32 beside float64.
        torch.testing.assert_close(found[name] / scale, (expected / scale).float(), atol=1e-5, rtol=0, msg=name)


def test_rows_beyond_the_limit_of_gpt_oss_get_no_gradient() -> None:
    module = module_of("gpt_oss")
    products = torch.tensor([[7.5, 1.0, 6.5, -7.5, -9.0, 6.9]], requires_grad=True)
    gate = Gate.of(module)
    assert gate is not None
    gate.apply(products, torch.ones(1), None, torch.ones(1, dtype=torch.int32)).sum().backward()
    assert products.grad is not None
    assert (products.grad != 0).tolist() == [[False, True, True, False, True, True]]


def test_experts_with_another_activation_have_no_gate_of_ours() -> None:
    assert Gate.of(module_of("qwen3_moe", hidden_act="gelu")) is None
