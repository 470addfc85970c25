"""Pinned memory of the host in exactly the size that is asked for, which is given back when it is no longer used.

Called by `offload` for copies of parameters and moments. torch's own pinned memory (`pin_memory=True`) comes in powers
of two and stays in a cache: a shard of 136 MB takes 268 MB, and AdamW's moments of a Qwen2 of 7 B parameters take 107
GB of the host where they have 57 GB.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["host_buffer"]

# What CUDA calls `cudaHostRegisterPortable`.
_PORTABLE = 1


def host_buffer(num_bytes: int, *, pinned: bool) -> Tensor:
    """Return uint8 [num_bytes] on the host, not filled.

    Args:
        pinned: the device reads and writes it at the speed of the bus.

    Raises:
        torch.cuda.CudaError: the driver cannot pin so much.
    """
    if not pinned:
        return torch.empty(num_bytes, dtype=torch.uint8)
    # Whole pages of its own: CUDA pins no page twice.
    pages = mmap.mmap(-1, num_bytes)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    address = buffer.data_ptr()
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE)))
    # Before the pages are unmapped; when the process ends the driver gives everything back by itself.
    weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
    return buffer
