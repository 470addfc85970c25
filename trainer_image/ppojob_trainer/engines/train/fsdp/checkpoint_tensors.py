"""The tensors of a HuggingFace checkpoint that a parameter of a model becomes, by name, and as views of it.

    model.layers.0.mlp.experts.gate_up_proj [E, 2 I, D]   ─▶   ...block_sparse_moe.experts.0.w1.weight [I, D]
                                                               ...block_sparse_moe.experts.0.w3.weight [I, D]

Called by `weights`. transformers has renamed the parameters of some families and fused the experts of a layer since
their checkpoints were written; its own table says how (`revert_weight_conversion`). It is asked with shapes alone,
because it copies what it splits: of a layer of DeepSeek-V3, 15 GB. It refuses parameters that a checkpoint combines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ppojob_trainer.engines.errors import ModelUnsupportedError

__all__ = ["Written", "written_of"]


@dataclass(frozen=True)
class Written:
    """A tensor of a checkpoint. expert: it is a part of this expert in a fused parameter, from first_row on."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    first_row: int = 0

    def of(self, whole: Tensor, first_expert: int = 0) -> Tensor:
        """Return the tensor as a view of the whole parameter, or of a block of its experts from `first_expert` on."""
        if self.expert is None:
            return whole
        return whole[self.expert - first_expert].narrow(0, self.first_row, self.shape[0])


def written_of(model: PreTrainedModel, name: str, shape: tuple[int, ...]) -> list[Written]:
    """Return the tensors of a checkpoint for a parameter or stored buffer of a model; those of fused experts in order.

    Raises:
        ModelUnsupportedError: it becomes something else than itself or its experts.
    """
    reverted = revert_weight_conversion(model, {name: torch.empty(shape, device="meta")})
    found: list[Written] = []
    if len(reverted) == 1:
        found = [Written(written, shape) for written in reverted]
    elif len(shape) == 3:
        experts, rows = shape[0], shape[1] * shape[0] // len(reverted)
        of_expert = [divmod(number, experts) for number in range(len(reverted))]
        found = [
            Written(written, (rows, shape[2]), expert, part * rows)
            for written, (part, expert) in zip(reverted, of_expert, strict=True)
        ]
    if not found or not all(_is_part(one, tuple(reverted[one.name].shape)) for one in found):
        raise ModelUnsupportedError(
            f"{model.config.model_type}: checkpoints have {name} in a form that is neither the parameter nor its "
            "experts, which is not supported: use a model of another family"
        )
    return found


def _is_part(written: Written, shape: tuple[int, ...]) -> bool:
    return written.shape == shape and (written.expert is None or f".{written.expert}." in written.name)
