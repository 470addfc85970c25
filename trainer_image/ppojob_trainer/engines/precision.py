"""The dtype of the computation on a device. Called by the roles for their engines, and by vLLM's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ppojob_api.v1alpha1.runtime import Device

if TYPE_CHECKING:
    import torch


def precision_of(device: Device) -> Literal["bfloat16", "float32"]:
    """Return the name of the dtype.

    bfloat16 needs hardware support, which few CPUs have: without it, PyTorch's matrix product takes 75 times as long as
    in float32 (measured with AVX2 alone).
    """
    return "bfloat16" if device is Device.CUDA else "float32"


def dtype_of(device: Device) -> torch.dtype:
    """Return the dtype as PyTorch's type."""
    import torch

    return torch.bfloat16 if precision_of(device) == "bfloat16" else torch.float32
