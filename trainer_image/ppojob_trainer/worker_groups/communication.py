"""Whether an exception says that processes no longer reach each other: NCCL, gloo, or torch's own store.

A peer that is gone, a network that is down, and a collective that ran out of its time look the same to the ranks that
are left. So this explains nothing by itself: `futures` and `lost_objects` ask who is gone, and what nobody explains
`main.failures` calls by its name. torch is not loaded here; its classes are known by their names.
"""

from __future__ import annotations

import re
from typing import Final

from ppojob_api.v1alpha1.constants import Reason

__all__ = ["is_of_communication"]

# torch.distributed's base class of what NCCL, a socket or a store did not do.
_TORCHS: Final = "DistError"
# gloo raises plain RuntimeErrors that begin with the place in its source.
_GLOOS: Final = re.compile(r"^\[\S*/gloo/transport/")


def is_of_communication(error: BaseException | None) -> bool:
    """Whether it is the words of a process that did not reach another one."""
    if error is None:
        return False
    if isinstance(error, ConnectionError) or getattr(error, "reason", None) == Reason.COMMUNICATION_FAILED:
        return True
    is_torchs = any(base.__name__ == _TORCHS for base in type(error).__mro__)
    return is_torchs or (type(error) is RuntimeError and _GLOOS.match(str(error)) is not None)
