"""What models are computed in on a device: the roles ask it for their engines, and vLLM's options for the rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ppojob_api.v1alpha1.runtime import Device

if TYPE_CHECKING:
    import torch


def precision_of(device: Device) -> Literal["bfloat16", "float32"]:
    """Return the type's name.

    bfloat16 needs units of its own, which few CPUs have: without them PyTorch's product of two matrices takes 75 times
    as long as in float32 (measured with AVX2 alone).
    """
    return "bfloat16" if device is Device.CUDA else "float32"


def dtype_of(device: Device) -> torch.dtype:
    """Return the same as PyTorch's type."""
    import torch

    return torch.bfloat16 if precision_of(device) == "bfloat16" else torch.float32
