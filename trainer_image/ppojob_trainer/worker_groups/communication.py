"""Whether an exception means that processes no longer reach each other: NCCL, gloo, or torch's store.

A lost rank, a network failure, and a collective that timed out look the same to the remaining ranks. So such an error
is not an explanation: `futures` and `lost_objects` look for a lost process, and `main.failures` names the error if
there is none. torch is not imported here; its classes are recognized by name.
"""

from __future__ import annotations

import re
from typing import Final

from ppojob_api.v1alpha1.constants import Reason

__all__ = ["is_of_communication"]

# torch.distributed's base class for errors of NCCL, sockets and stores.
_TORCHS: Final = "DistError"
# gloo raises plain RuntimeErrors that start with the location in its source.
_GLOOS: Final = re.compile(r"^\[\S*/gloo/transport/")


def is_of_communication(error: BaseException | None) -> bool:
    """Whether the error comes from a process that could not reach another one."""
    if error is None:
        return False
    if isinstance(error, ConnectionError) or getattr(error, "reason", None) == Reason.COMMUNICATION_FAILED:
        return True
    is_torchs = any(base.__name__ == _TORCHS for base in type(error).__mro__)
    return is_torchs or (type(error) is RuntimeError and _GLOOS.match(str(error)) is not None)
