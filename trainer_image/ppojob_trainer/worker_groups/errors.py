"""Errors between the controller and the role processes.

Raised by this package, mapped to named failures of the job by `main`. The exception of the user's code or of an engine
is always the `__cause__`.
"""

from __future__ import annotations

from typing import Self


class WorkerGroupError(RuntimeError):
    """Base of this package's errors.

    only_processes: processes were lost, and all pods of the fixed pools are still connected.
    role: group of the process that failed; None: unknown.
    """

    only_processes = False
    role: str | None = None

    def of(self, role: str) -> Self:
        """Return the error with the role."""
        self.role = role
        return self


class PoolNotPlacedError(WorkerGroupError):
    """A pool's placement group could not be created; the message names the missing resources."""


class WorkerLostError(WorkerGroupError):
    """A role process exited or cannot be reached."""


class WorkerOutOfMemoryError(WorkerGroupError):
    """A role process was terminated because its node ran out of memory."""


class GPUFaultError(WorkerGroupError):
    """A GPU of a process has failed; `address` is the IP address of its pod."""

    def __init__(self, message: str, address: str) -> None:
        # Both are arguments of the base class, so that Ray can send the exception to the controller.
        super().__init__(message, address)
        self.address = address

    def __str__(self) -> str:
        """Return the message without the address."""
        return str(self.args[0])


class WorkerFailedError(WorkerGroupError):
    """A worker's method raised; `__cause__` is what it raised."""


class CallTimeoutError(WorkerGroupError):
    """A call was not answered within its limit."""


class NotRenewableError(WorkerGroupError):
    """A process of an earlier attempt cannot continue in this one."""


class SupersededError(WorkerGroupError):
    """A later attempt has taken the process over."""


class WorkerImportError(WorkerGroupError):
    """A user-defined worker class cannot be imported, or lacks the method that a hook names; the message says where."""


class HookFailedError(WorkerGroupError):
    """A user-defined worker failed in a hook; `__cause__` names the process."""
