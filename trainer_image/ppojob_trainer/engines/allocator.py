"""Settings of PyTorch's allocator for GPU memory in the processes of trained roles.

By default, the allocator reserves a separate segment for each size that it lacks, and memory that was freed in one
segment cannot be used with that of another. The micro-batches of a step have different sizes, so many segments stay
partly used. Expandable segments are extended instead (PyTorch, "CUDA semantics", `expandable_segments`).

Memory of such segments is passed to another process by `pidfd_getfd`, which a pod's security settings can forbid. So
memory that is shared by CUDA IPC comes from ordinary segments.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

__all__ = ["ordinary_segments", "use_expandable_segments"]

VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with the settings, the first one that is set counts. See torch's documentation."""
_NAME: Final = "expandable_segments"
_used: Final[list[bool]] = []
"""Not empty if this process uses expandable segments."""


def use_expandable_segments() -> None:
    """Let the allocator of this process extend its segments, unless its environment variable has that setting."""
    _set(settings(of_environment(), expandable=True))
    _used.append(True)


@contextmanager
def ordinary_segments() -> Iterator[None]:
    """Within the block, new memory of this process is not from expandable segments, so CUDA IPC can share it."""
    _set(settings(of_environment(), expandable=False))
    try:
        yield
    finally:
        _set(settings(of_environment(), expandable=True) if _used else of_environment())


def of_environment() -> str:
    """Return the settings in the environment; empty if there are none."""
    return next((value for name in VARIABLES if (value := os.environ.get(name))), "")


def settings(given: str, *, expandable: bool) -> str:
    """Return all settings as torch reads them, because it forgets those that it is not given again.

    Args:
        given: those of the user.
        expandable: True: segments are expandable, unless the user's settings say something about it. False: they are
            not, whatever those say.
    """
    own = [part for part in _parts(given) if part]
    others = [part for part in own if part.partition(":")[0].strip() != _NAME]
    if expandable and len(others) < len(own):
        return ",".join(own)
    return ",".join([*others, f"{_NAME}:{expandable}"])


def _parts(given: str) -> list[str]:
    """Divide settings at the commas outside of brackets: `roundup_power2_divisions:[256:1,512:2],...`."""
    parts, depth = [""], 0
    for letter in given:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _set(conf: str) -> None:
    torch._C._accelerator_setAllocatorSettings(conf)
