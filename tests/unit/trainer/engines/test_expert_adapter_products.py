"""Adapters on experts of one rank: the numbers of a loop over the experts, and what their backward pass computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.engines.train.fsdp import experts
from ppojob_trainer.engines.train.fsdp.lora import adapters_off, add_adapters, is_adapter
from tests.unit.trainer.engines.test_grouped_experts import (
    _Products,
    inputs,
    saved_shapes,
    without_grouped_products,
)
from tests.unit.trainer.engines.tiny_experts import (
    EXPERT_SIZE,
    NUM_EXPERTS,
    PER_TOKEN,
    tiny_experts,
)

HIDDEN = 48
RANK, FACTOR = 3, 4.0
USUAL = ("gate_proj", "up_proj", "down_proj")


def adapted(targets: list[str], family: str = "qwen3_moe", rank: int = RANK, **settings: Any) -> tuple[str, nn.Module]:
    """Return the first layer's experts with adapters whose matrices are random, and their name."""
    model = tiny_experts(family=family, **settings)
    experts.add_counts(model)
    model.requires_grad_(False)
    add_adapters(
        model, model.base_model.get_submodule("layers"), LoRA(rank=rank, alpha=FACTOR * rank, target_modules=targets)
    )  # type: ignore[arg-type]
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            nn.init.normal_(parameter, std=0.2)
    name, found = next(experts.expert_modules(model))
    found.config._experts_implementation = experts.IMPLEMENTATION  # type: ignore[union-attr, assignment]
    return name, found


def loop(module: nn.Module, targets: list[str], hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """One expert after the other, each as three linear layers with adapters as in the paper."""
    total = torch.zeros_like(hidden)
    layers = dict(module.named_parameters())
    for expert in range(NUM_EXPERTS):

        def linear(tokens: Tensor, weight: Tensor, fused: str, name: str, expert: int = expert) -> Tensor:
            output = functional.linear(tokens, weight)
            if name in targets:
                down, up = (layers[f"adapters.{fused}.{name}.lora_{part}"][expert] for part in "AB")
                output = output + FACTOR * functional.linear(functional.linear(tokens, down), up)
            return output

        of_gate, of_up = layers["gate_up_proj"][expert].chunk(2)
        gate = linear(hidden, of_gate, "gate_up_proj", "gate_proj")
        up = linear(hidden, of_up, "gate_up_proj", "up_proj")
        inner = functional.silu(gate) * up
        result = linear(inner, layers["down_proj"][expert], "down_proj", "down_proj")
        total = total + result * ((chosen == expert) * weights).sum(dim=1, keepdim=True)
    return total


TARGETS = [[*USUAL], ["gate_proj", "up_proj"], ["gate_proj"], ["up_proj", "down_proj"], ["down_proj"]]


@pytest.mark.parametrize("rank", [RANK, 8])
@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_values_and_gradients_are_those_of_a_loop_over_the_experts(targets: list[str], rank: int) -> None:
    _, module = adapted(targets, rank=rank)
    hidden, chosen, weights = inputs(torch.float32, torch.float32)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * len(targets)
    outer = torch.linspace(-1, 2, hidden.numel()).view_as(hidden)
    given = [hidden, weights, *trained.values()]

    output = experts.count_and_multiply(module, hidden, chosen, weights)
    found = [output, *torch.autograd.grad(output, given, outer)]

    expected = loop(module, targets, hidden, chosen, weights)
    exact = [expected, *torch.autograd.grad(expected, given, outer)]
    for name, ours, theirs in zip(["output", "hidden", "weights", *trained], found, exact, strict=True):
        scale = theirs.abs().max()
        assert scale > 0
        # Float32 sums in another order.
        torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-5, rtol=0, msg=name)
    for name, gradient in zip(trained, found[3:], strict=True):
        assert not gradient[-1].any(), f"{name}: no token chose the last expert"
    with adapters_off(module):
        plain = experts.count_and_multiply(module, hidden, chosen, weights)
    torch.testing.assert_close(plain, loop(module, [], hidden, chosen, weights), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("targets", [["gate_up_proj", "down_proj"], ["gate_up_proj"], ["down_proj"]], ids=str)
def test_those_of_gpt_oss_are_transformers_experts_with_other_weights(targets: list[str]) -> None:
    """Its weights are transposed, with gate and up side by side in one adapter, and biases have none."""
    _, module = adapted(targets, "gpt_oss")
    hidden, chosen, weights = inputs(torch.float32, torch.float32)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * len(targets)
    outer = torch.linspace(-1, 2, hidden.numel()).view_as(hidden)
    given = [hidden, weights, *trained.values()]

    output = module(hidden, chosen, weights)
    found = [output, *torch.autograd.grad(output, given, outer)]

    module.config._experts_implementation = "eager"  # type: ignore[union-attr, assignment]
    expected = functional_call(module, merged(module, targets, FACTOR), (hidden, chosen, weights))
    exact = [expected, *torch.autograd.grad(expected, given, outer)]
    for name, ours, theirs in zip(["output", "hidden", "weights", *trained], found, exact, strict=True):
        scale = theirs.abs().max()
        assert scale > 0
        # Float32 sums in another order.
        torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-5, rtol=0, msg=name)


def merged(module: nn.Module, targets: list[str], factor: float) -> dict[str, Tensor]:
    """Return the weights [E, inputs, outputs] of gpt-oss's experts with their adapters, differentiable."""
    parts = dict(module.named_parameters())
    return {
        name: parts[name]
        + factor
        * torch.einsum("eor,eri->eio", parts[f"adapters.{name}.{name}.lora_B"], parts[f"adapters.{name}.{name}.lora_A"])
        for name in targets
    }


def test_frozen_experts_get_no_gradients_beside_their_adapters() -> None:
    _, module = adapted([*USUAL])
    hidden, chosen, weights = inputs(torch.float32, torch.float32)
    with _Products() as products:
        with saved_shapes() as saved:
            output = experts.count_and_multiply(module, hidden, chosen, weights)
        assert products.number == 2 * 3
        output.sum().backward()
    # The rows' gradients of six products, and those of two pairs of matrices.
    assert products.number == 2 * 3 + 6 + 4
    rows = len(hidden) * PER_TOKEN
    assert saved.count((rows, HIDDEN)) == 1
    assert saved.count((rows, EXPERT_SIZE)) == 1


@pytest.mark.parametrize("rank", [RANK, 16])
@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_no_copy_of_matrices_is_kept_for_the_backward_pass(targets: list[str], rank: int) -> None:
    """Padded copies of all layers of a large mixture take GBs."""
    _, module = adapted(targets, rank=rank)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts.count_and_multiply(module, *inputs(torch.float32, torch.float32))
    parameters = {parameter.data_ptr() for parameter in module.parameters()}
    in_three_dimensions = [tensor.data_ptr() for tensor in saved if tensor.ndim == 3]
    # Two weights of the base, and two matrices of each adapter.
    assert len(in_three_dimensions) == 2 + 2 * len(targets)
    assert set(in_three_dimensions) == parameters


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_without_grouped_products_values_and_gradients_are_the_same(
    targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module = adapted(targets)
    hidden, chosen, weights = inputs(torch.float32, torch.float32)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def results() -> list[Tensor]:
        output = experts.count_and_multiply(module, hidden, chosen, weights)
        return [output, *torch.autograd.grad(output.square().sum(), [hidden, weights, *trained])]

    expected = results()
    without_grouped_products(monkeypatch)
    with _Products() as products:
        found = results()
    assert products.number == 0
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class _Weights(TorchDispatchMode):
    """Records the shapes of the matrices by which rows are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten._grouped_mm.default:
            self.shapes.append(tuple(args[1].shape))
        return operation(*args, **kwargs or {})


def test_a_recomputed_layer_leaves_out_the_last_product_of_the_base() -> None:
    _, module = adapted([*USUAL])
    hidden, chosen, weights = inputs(torch.float32, torch.float32)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    outer = torch.linspace(-1, 2, hidden.numel()).view_as(hidden)
    output = experts.count_and_multiply(module, hidden, chosen, weights)
    expected = torch.autograd.grad(output, [hidden, weights, *trained], outer)
    with _Weights() as seen:
        output = checkpoint(experts.count_and_multiply, module, hidden, chosen, weights, use_reentrant=False)
        found = torch.autograd.grad(output, [hidden, weights, *trained], outer)
    assert len(seen.shapes) == 6 + 5 + 10
    # Gate and up are computed twice, and down once; the transposed ones are those of the rows' gradients.
    base = {"gate_up": (NUM_EXPERTS, HIDDEN, 2 * EXPERT_SIZE), "down": (NUM_EXPERTS, EXPERT_SIZE, HIDDEN)}
    assert {name: seen.shapes.count(shape) for name, shape in base.items()} == {"gate_up": 2, "down": 1}
    for ours, of_all in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, of_all, atol=0, rtol=0)


def test_without_rows_adapters_get_gradients_of_zeros() -> None:
    from ppojob_trainer.engines.train.fsdp.grouped_experts import multiply

    _, module = adapted([*USUAL])
    rows = torch.zeros(0, HIDDEN, requires_grad=True)
    multiply(module, rows, torch.zeros(0), torch.zeros(NUM_EXPERTS, dtype=torch.int32)).sum().backward()
    for parameter in module.parameters():
        assert parameter.requires_grad == (parameter.grad is not None)
        assert parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize("rank", [RANK, 16])
def test_in_bfloat16_every_product_has_rows_of_a_multiple_of_16_bytes(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the grouped product of a GPU needs; the one of the CPU does not."""
    from ppojob_trainer.engines.train.fsdp import low_rank

    _, module = adapted([*USUAL], rank=rank)
    seen: list[Tensor] = []
    product = low_rank._grouped_linear

    def observed(rows: Tensor, weight: Tensor, ends: Tensor, **options: Any) -> Tensor:
        seen.extend([rows, weight])
        return product(rows, weight, ends, **options)

    monkeypatch.setattr(low_rank, "_grouped_linear", observed)
    hidden, chosen, weights = inputs(torch.bfloat16, torch.bfloat16)
    experts.count_and_multiply(module.bfloat16(), hidden, chosen, weights).sum().backward()
    # Four products, and those of the gradients of their rows.
    assert len(seen) == 2 * (4 + 4)
    for tensor in seen:
        assert tensor.is_contiguous()
        assert tensor.shape[-1] * tensor.element_size() % 16 == 0
        assert tensor.data_ptr() % 16 == 0
