"""Whether an exception of a process means that its GPU has failed: ECC and NVLink errors, Xid messages of the driver.

torch, NCCL and vLLM raise different classes with CUDA's words in them, so the words decide. An error that a wrong
program causes too, such as an illegal memory access, is no fault of the GPU. Called by `worker_process`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

__all__ = ["is_gpu_fault"]

_OF_A_GPU: Final = re.compile(r"cuda|nccl|nvrm|\bgpu\b|nvidia", re.IGNORECASE)
# CUDA's messages of cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable and cudaErrorHardwareStackError, NVML's of
# a lost GPU, and the driver's Xid.
_FAULTS: Final = re.compile(
    r"uncorrectable|\becc\b|\bxid\b|hardware stack error|fallen off the bus|gpu is lost", re.IGNORECASE
)


def is_gpu_fault(error: BaseException) -> bool:
    """Return whether the error, or one that it follows from, reports a failed GPU."""
    return any(_FAULTS.search(text) is not None and _OF_A_GPU.search(text) is not None for text in _messages(error))


def _messages(error: BaseException) -> Iterator[str]:
    link: BaseException | None = error
    while link is not None:
        yield str(link)
        link = link.__cause__ or link.__context__
