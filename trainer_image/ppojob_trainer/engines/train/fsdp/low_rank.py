"""Low-rank adapters on frozen weights: LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1).

    y = x W^T + alpha / rank * x A^T B^T        A: [rank, inputs], B: [outputs, rank]

Of a linear layer, and of the experts of a layer, each of which has separate matrices for each of its projections.
`lora` decides which layers get them and what is in them; `grouped_experts` calls those of experts. There is no dropout,
because log-probs must be the same each time they are taken.

On a tensor-parallel layer, A and B are divided as W is. Their product is added before the ranks' results are summed, so
no activation is communicated in addition. The gradient of the matrix that is whole is summed over the tensor-parallel
ranks in each backward pass, in the dtype in which the layer computes, with those of the other adapters of a decoder
layer in one message (`tensor_parallel`):

    W divided by outputs    A whole, B divided by outputs    gradient of A: each rank's outputs give a part
    W divided by inputs     A divided by inputs, B whole     gradient of B: each rank's inputs give a part

Of experts, A is [E, rank, inputs] and B [E, outputs, rank], and whatever divides the experts divides both by experts.
That is so also where the experts' weight is [E, inputs, outputs], as in gpt-oss. transformers fuses projections with
the same inputs in one parameter, and their adapters are computed together: two grouped products over the rows that are
sorted already. Here of gate and up, with a rank of 3:

    rows [S, D]  ─ A of gate, 0, A of up, 0 ─▶  [S, 8 + 8]  ─ B of gate, 0, 0, 0 ─▶  [S, 2 I]
                                                              0, 0, B of up, 0

A GPU's grouped product needs rows of a multiple of 16 bytes: each rank is padded with zeros, which change no number.
The padded copies are not kept for the backward pass, which pads again: without gradient checkpointing, those of all
layers of Qwen3-30B-A3B would take 2 GB with a rank of 16. Compiled layers keep them.

Suffixes: S rows, D size of the inputs, O of the outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from transformers.integrations.moe import _grouped_linear

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.engines.train.fsdp.grouped_products import ALIGNED, weight_gradient
from ppojob_trainer.engines.train.fsdp.tensor_parallel import local
from ppojob_trainer.maths.rounding import round_stochastically

__all__ = ["ExpertProjection", "LoRAExperts", "LoRALinear", "merge"]

_MERGED_NUMBERS: Final = 2**24
"""Numbers of experts that are merged before they are rounded together: a product and its rounding for each expert would
keep the processor busy for seconds."""


class LoRALinear(nn.Linear):
    """A linear layer with an adapter. Weight and bias keep their names, so checkpoints of the model fit."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    factor: float
    is_on: bool

    @staticmethod
    def of(linear: nn.Linear, lora: LoRA) -> LoRALinear:
        """Give a layer an adapter, which is not filled yet.

        It stays the same object, as with FSDP, because tensor parallelism has replaced its `forward`.
        """
        linear.__class__ = LoRALinear
        adapted = cast("LoRALinear", linear)
        adapted.lora_A = _empty(linear.weight, (lora.rank, linear.in_features), divided_dim=1)
        adapted.lora_B = _empty(linear.weight, (linear.out_features, lora.rank), divided_dim=0)
        adapted.factor, adapted.is_on = lora.alpha / lora.rank, True
        return adapted

    def forward(self, input: Tensor) -> Tensor:
        """Return y of the module's docstring."""
        if not self.is_on:
            return functional.linear(input, self.weight, self.bias)
        rows_TD = input.flatten(0, -2)
        added_TO = functional.linear(functional.linear(rows_TD, self.lora_A), self.lora_B)
        # One product, which adds in float32 and rounds once. A small change of a result that is bfloat16 already would
        # be rounded off.
        output = torch.addmm(added_TO, rows_TD, self.weight.t(), beta=self.factor).view(
            *input.shape[:-1], added_TO.shape[1]
        )
        # Not in the product, beside the adapter, which would be rounded off where a bias is large.
        return output if self.bias is None else output + self.bias


class ExpertProjection(nn.Module):
    """The matrices of one projection of all experts of a layer. It is not called: `LoRAExperts` computes with them."""

    def __init__(self, weight: Tensor, num_inputs: int, rows: range, lora: LoRA) -> None:
        """Create them, not filled yet.

        Args:
            weight: the fused parameter, of E experts; rows: its outputs that are this projection's.
        """
        super().__init__()
        num_experts = len(weight)
        self.rows = rows
        self.lora_A = _empty(weight, (num_experts, lora.rank, num_inputs), divided_dim=0)
        self.lora_B = _empty(weight, (num_experts, len(rows), lora.rank), divided_dim=0)


class LoRAExperts(nn.Module):
    """The adapters of a fused parameter of experts: one for each projection in it, or for some of them."""

    def __init__(
        self, weight: Tensor, projections: Mapping[str, range], lora: LoRA, *, is_transposed: bool = False
    ) -> None:
        """Create adapters that are not filled yet.

        Args:
            weight: [E, O, D], or [E, D, O] if it is transposed.
            projections: by their names in checkpoints; which outputs of the parameter they are.
        """
        super().__init__()
        num_outputs, num_inputs = weight.shape[:0:-1] if is_transposed else weight.shape[1:]
        self.factor, self.is_on, self.is_transposed = lora.alpha / lora.rank, True, is_transposed
        width, up, down = -(-lora.rank // ALIGNED) * ALIGNED, [], []
        for number, (name, rows) in enumerate(projections.items()):
            self.add_module(name, ExpertProjection(weight, num_inputs, rows, lora))
            ranks = slice(number * width, number * width + lora.rank)
            down.append((ranks, slice(num_inputs)))
            up.append((slice(rows.start, rows.stop), ranks))
        self._down = _Padding((len(down) * width, num_inputs), tuple(down))
        self._up = _Padding((num_outputs, len(up) * width), tuple(up))

    def forward(self, rows_SD: Tensor, ends_E: Tensor) -> Tensor | None:
        """Return what the adapters add to the rows' outputs, [S, O]; None if they are off.

        Args:
            rows_SD: sorted by expert, at least one; ends_E: see `grouped_experts.multiply`.
        """
        if not self.is_on:
            return None
        down = [local(projection.lora_A) for projection in self._projections()]
        up = [local(projection.lora_B) for projection in self._projections()]
        inner = _padded_product(rows_SD, ends_E, self._down, down) * self.factor
        return _padded_product(inner, ends_E, self._up, up)

    def merge_into(self, weight: Tensor, dtype: torch.dtype, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Return W + factor * B A in `dtype`, of each expert as `merge` and `round_stochastically` compute it.

        The bytes of an expert do not depend on how many of them are merged at a time.

        Args:
            weight: of some experts; whole: returns these experts' part of an adapter's parameter.
        """
        merged = weight.to(dtype, copy=True)
        num_inputs = weight.shape[1 if self.is_transposed else 2]
        for projection in self._projections():
            down, up = whole(projection.lora_A.detach()), whole(projection.lora_B.detach())
            rows = slice(projection.rows.start, projection.rows.stop)
            if self.is_transposed:
                # (W + B A)^T = W^T + A^T B^T
                place, down, up = (slice(None), rows), up.mT, down.mT
            else:
                place = (rows, slice(None))
            # A few at a time: a layer's experts in float32 take twice the memory of the layer.
            number = max(1, _MERGED_NUMBERS // (len(projection.rows) * num_inputs))
            for first in range(0, len(weight), number):
                some = range(first, min(first + number, len(weight)))
                exact = [merge(weight[one][place], down[one], up[one], self.factor) for one in some]
                merged[(slice(some.start, some.stop), *place)] = round_stochastically(torch.stack(exact), dtype)
        return merged

    def _projections(self) -> Iterator[ExpertProjection]:
        for projection in self.children():
            assert isinstance(projection, ExpertProjection)
            yield projection


@dataclass(frozen=True)
class _Padding:
    """How the matrices of some projections become one weight of all of them, whose other numbers are 0.

    shape: outputs and inputs of the weight. places: those of each matrix.
    """

    shape: tuple[int, int]
    places: tuple[tuple[slice, slice], ...]

    def weight(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return the weight [E, *shape] of matrices of three dimensions."""
        weight = matrices[0].new_zeros(len(matrices[0]), *self.shape)
        for (outputs, inputs), matrix in zip(self.places, matrices, strict=True):
            weight[:, outputs, inputs] = matrix
        return weight

    def matrices(self, weight: Tensor) -> list[Tensor]:
        """Return the matrices of a weight."""
        return [weight[:, outputs, inputs].contiguous() for outputs, inputs in self.places]


def _padded_product(rows: Tensor, ends_E: Tensor, padding: _Padding, matrices: Sequence[Tensor]) -> Tensor:
    """Return the rows times their experts' padded weight."""
    if torch.compiler.is_compiling():
        # The compiler decides what is kept, here the padded weight too.
        compiled: Tensor = _grouped_linear(rows, padding.weight(matrices), ends_E)
        return compiled
    found: Tensor = _PaddedProduct.apply(rows, ends_E, padding, *matrices)  # type: ignore[no-untyped-call]
    return found


class _PaddedProduct(torch.autograd.Function):
    """`_grouped_linear`, but the backward pass pads the matrices again. Its products are those of PyTorch's own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends_E: Tensor, padding: _Padding, *matrices: Tensor) -> Tensor:
        ctx.padding = padding
        ctx.save_for_backward(rows, ends_E, *matrices)
        found: Tensor = _grouped_linear(rows, padding.weight(matrices), ends_E)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outer,) = gradients
        rows, ends_E, *matrices = ctx.saved_tensors
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = _grouped_linear(outer, ctx.padding.weight(matrices), ends_E, is_transposed=True)
        return of_rows, None, None, *ctx.padding.matrices(weight_gradient(outer, rows, ends_E))


def merge(weight: Tensor, down: Tensor, up: Tensor, factor: float) -> Tensor:
    """Return W + factor * B A in float32; down is A, up is B."""
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=factor)


def _empty(weight: Tensor, shape: tuple[int, ...], divided_dim: int) -> nn.Parameter:
    """Return a matrix of an adapter in float32, divided where the layer's weight is divided in the same dimension."""
    matrix = torch.empty(shape, dtype=torch.float32, device=weight.device)
    if isinstance(weight, DTensor):
        placements = [one if one == Shard(divided_dim) else Replicate() for one in weight.placements]
        # On the meta device there is nothing to send.
        matrix = distribute_tensor(matrix, weight.device_mesh, placements, src_data_rank=None)
    return nn.Parameter(matrix)
