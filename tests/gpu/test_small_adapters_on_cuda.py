"""Adapters whose changes are far below the precision of bfloat16, on a GPU: layers, compiled too, experts, pushes."""

from __future__ import annotations

import pytest
import torch

from ppojob_trainer.maths.rounding import round_stochastically
from tests.unit.trainer.engines.test_small_adapters import share_in_a_layer, share_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layers_result_has_all_of_a_small_adapter(has_bias: bool, compiles: bool) -> None:
    assert share_in_a_layer("cuda", has_bias=has_bias, compiles=compiles) == pytest.approx(1, abs=0.1)


def test_sums_of_experts_and_adapters_have_all_of_small_numbers() -> None:
    # It needs Triton, which machines without a GPU do not have.
    from ppojob_trainer.engines.train.fsdp import experts_cuda

    base = torch.randn(1000, 2049, device="cuda").bfloat16()
    added = (2e-5 * torch.randn(base.shape, device="cuda")).bfloat16()
    total = base.clone()

    experts_cuda.add(total, added)

    assert share_of(total.double() - base.double(), added) == pytest.approx(1, abs=0.1)
    assert share_of((base + added).double() - base.double(), added) < 0.5
    exact = base.float() + added.float()
    assert bool(((total.float() - exact).abs() <= exact.abs() / 128).all())
    assert torch.equal(total, round_stochastically(exact, torch.bfloat16))
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0], device="cuda").bfloat16()
    kept = special.clone()
    experts_cuda.add(kept, torch.zeros_like(kept))
    assert torch.equal(kept.isnan(), special.isnan())
    assert torch.equal(kept[1:], special[1:])


def test_weights_are_rounded_to_the_bytes_of_a_processor() -> None:
    weights = (0.02 * torch.randn(700, 3001, generator=torch.Generator().manual_seed(1))).bfloat16().float() + 1e-5

    assert torch.equal(
        round_stochastically(weights.cuda(), torch.bfloat16).cpu(), round_stochastically(weights, torch.bfloat16)
    )
