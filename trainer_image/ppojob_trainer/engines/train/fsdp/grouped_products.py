"""What all grouped products need: products of rows that are sorted by expert, with a matrix for each expert.

transformers multiplies (`_grouped_linear`): by one kernel for all experts on the CPU and on GPUs from compute
capability 8.0, else by one product for each expert. Here are the size that its kernels need, and the gradient of the
matrices for functions that have their own backward pass. Used by `grouped_experts`, `expert_gates` and `low_rank`.

Suffixes: S rows, D size of the inputs, O of the outputs, E experts.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.moe import _can_use_grouped_mm

__all__ = ["ALIGNED", "weight_gradient"]


ALIGNED: Final = 8
"""Numbers of which a GPU's grouped product needs a multiple in a row: 16 bytes in bfloat16, and 32 in float32."""


def weight_gradient(outer_SO: Tensor, rows_SD: Tensor, ends_E: Tensor) -> Tensor:
    """Return the gradient [E, O, D] of a grouped product's weight; `outer_SO` is that of its result.

    Sums are in float32, in a fixed order.

    Args:
        ends_E: after which row the rows of each expert end, int32.
    """
    if _can_use_grouped_mm(rows_SD, outer_SO, ends_E):
        return functional.grouped_mm(outer_SO.T, rows_SD, offs=ends_E)
    # A GPU without a grouped product.
    found = outer_SO.new_zeros(len(ends_E), outer_SO.shape[1], rows_SD.shape[1])
    first = 0
    for expert, end in enumerate(ends_E.tolist()):
        torch.mm(outer_SO[first:end].T, rows_SD[first:end], out=found[expert])
        first = end
    return found
