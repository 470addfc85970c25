"""The experts of one rank: transformers' numbers for every family, and what their backward pass computes and keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.integrations import moe

from ppojob_trainer.engines.train.fsdp import experts, grouped_products
from ppojob_trainer.engines.train.fsdp.grouped_experts import multiply
from tests.unit.trainer.engines.tiny_experts import EXPERT_SIZE, MIXTURES, NUM_EXPERTS, PER_TOKEN, tiny_experts

HIDDEN, TOKENS = 48, 40
ROWS = TOKENS * PER_TOKEN


@pytest.fixture(params=MIXTURES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def experts_of(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    model = tiny_experts(dtype, family, **settings)
    experts.add_counts(model)
    _, found = next(experts.expert_modules(model))
    return found


def inputs(dtype: torch.dtype, of_weights: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, choices and weights; no token chooses the last expert."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    scores = torch.rand(TOKENS, NUM_EXPERTS - 1, generator=generator)
    weights, chosen = scores.topk(PER_TOKEN)
    return hidden, chosen, weights.to(of_weights).requires_grad_()


def results(module: nn.Module, implementation: str, *given: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradients of hidden states, weights and parameters."""
    module.config._experts_implementation = implementation  # type: ignore[union-attr, assignment]
    hidden, chosen, weights = given
    output = module(hidden, chosen, weights)
    outer = torch.linspace(-1, 2, output.numel()).view_as(output)
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad((output * outer).sum(), [hidden, weights, *parameters.values()])
    return {"output": output.detach()} | dict(zip(["hidden", "weights", *parameters], found, strict=True))


@pytest.mark.parametrize("theirs", ["eager", "grouped_mm"])
def test_values_and_gradients_are_those_of_transformers(family: str, theirs: str) -> None:
    module, given = experts_of(family), inputs(torch.float32, torch.float32)
    found = results(module, experts.IMPLEMENTATION, *given)
    for name, expected in results(module, theirs, *given).items():
        scale = expected.abs().max()
        assert scale > 0
        # Float32 sums in another order.
        torch.testing.assert_close(found[name] / scale, expected / scale, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float32])
def test_in_bfloat16_they_are_as_close_as_those_of_transformers(family: str, of_weights: torch.dtype) -> None:
    """DeepSeek-V3's routers have weights in float32."""
    module, given = experts_of(family, torch.bfloat16), inputs(torch.bfloat16, of_weights)
    found, theirs = (results(module, name, *given) for name in (experts.IMPLEMENTATION, "grouped_mm"))
    hidden, chosen, weights = given
    as_float = (one.detach().float().requires_grad_() for one in (hidden, weights))
    exact = results(module.float(), "eager", next(as_float), chosen, next(as_float))
    for name, expected in exact.items():
        assert found[name].dtype == theirs[name].dtype
        apart, of_theirs = ((one[name].float() - expected).norm() / expected.norm() for one in (found, theirs))
        # A rounding is up to 2^-9, and there are as many of them, in other places.
        assert apart < max(1.5 * of_theirs, 2**-8), name


def test_another_activation_is_computed_too() -> None:
    module, given = experts_of(hidden_act="gelu"), inputs(torch.float32, torch.float32)
    found = results(module, experts.IMPLEMENTATION, *given)
    for name, expected in results(module, "eager", *given).items():
        scale = expected.abs().max()
        torch.testing.assert_close(found[name] / scale, expected / scale, atol=1e-5, rtol=0, msg=name)


def without_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs before compute capability 8.0."""
    for owner in (moe, grouped_products):
        monkeypatch.setattr(owner, "_can_use_grouped_mm", lambda *_: False)


class _Products(TorchDispatchMode):
    """Counts the grouped products."""

    number = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += operation is torch.ops.aten._grouped_mm.default
        return operation(*args, **kwargs or {})


@contextmanager
def saved_shapes() -> Iterator[list[tuple[int, ...]]]:
    """Yield the shapes of what is saved for the backward pass, other than indices."""
    found: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize(("is_frozen", "backward"), [(True, 2), (False, 4)])
def test_frozen_experts_get_no_gradients(is_frozen: bool, backward: int) -> None:
    module = experts_of().requires_grad_(not is_frozen)
    hidden, chosen, weights = inputs(torch.float32, torch.float32)
    with _Products() as products:
        with saved_shapes() as saved:
            output = experts.count_and_multiply(module, hidden, chosen, weights)
        assert products.number == 2
        output.sum().backward()
    assert products.number == 2 + backward
    # The parameters of both products, the inputs of the gate, and the weights in the order of the tokens.
    least = [
        (ROWS,),
        (NUM_EXPERTS, HIDDEN, 2 * EXPERT_SIZE),
        (ROWS, 2 * EXPERT_SIZE),
        (ROWS,),
        (NUM_EXPERTS, EXPERT_SIZE, HIDDEN),
    ]
    more = [] if is_frozen else [(ROWS, HIDDEN), (ROWS, EXPERT_SIZE)]
    assert sorted(saved) == sorted(least + more)


def test_of_gates_with_a_limit_and_biases_only_their_inputs_are_saved() -> None:
    module = experts_of("gpt_oss").requires_grad_(False)
    with saved_shapes() as saved:
        experts.count_and_multiply(module, *inputs(torch.float32, torch.float32))
    of_rows = [shape for shape in saved if shape[0] == ROWS]
    assert sorted(of_rows) == [(ROWS,), (ROWS,), (ROWS, 2 * EXPERT_SIZE)]


def test_a_recomputed_layer_leaves_out_the_last_product() -> None:
    module = experts_of()
    hidden, chosen, weights = inputs(torch.float32, torch.float32)
    expected = results(module, experts.IMPLEMENTATION, hidden, chosen, weights)
    with _Products() as products:
        output = checkpoint(experts.count_and_multiply, module, hidden, chosen, weights, use_reentrant=False)
        outer = torch.linspace(-1, 2, output.numel()).view_as(output)
        found = torch.autograd.grad((output * outer).sum(), [hidden, weights, *module.parameters()])
    assert products.number == 2 + 1 + 4
    for gradient, of_all in zip(found, list(expected.values())[1:], strict=True):
        torch.testing.assert_close(gradient, of_all, atol=0, rtol=0)


@pytest.mark.parametrize(("family", "num_products"), [("qwen3_moe", 2), ("gpt_oss", 3)])
def test_without_rows_gradients_are_zero_and_no_kernel_is_called_without_rows(
    family: str, num_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gpt-oss, the last product's bias is a product, too."""
    from ppojob_trainer.engines.train.fsdp import grouped_experts

    module, seen = experts_of(family), []
    product = grouped_experts._grouped_linear

    def counted(rows: Tensor, *others: Any, **options: Any) -> Tensor:
        seen.append(len(rows))
        return product(rows, *others, **options)

    monkeypatch.setattr(grouped_experts, "_grouped_linear", counted)
    rows, weights = torch.zeros(0, HIDDEN, requires_grad=True), torch.zeros(0, requires_grad=True)

    output = multiply(module, rows, weights, torch.zeros(NUM_EXPERTS, dtype=torch.int32))
    output.sum().backward()

    assert output.shape == (0, HIDDEN)
    assert seen == [1] * num_products
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    assert rows.grad is not None
    assert weights.grad is not None


def test_trained_biases_need_no_kernel_for_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    module, given = experts_of("gpt_oss"), inputs(torch.float32, torch.float32)
    expected = results(module, experts.IMPLEMENTATION, *given)
    without_grouped_products(monkeypatch)
    with _Products() as products:
        found = results(module, experts.IMPLEMENTATION, *given)
    assert products.number == 0
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, atol=1e-4, rtol=1e-4, msg=name)
