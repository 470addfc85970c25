"""Errors between the controller and the role processes.

Raised by this package, mapped to named failures of the job by `main`. The exception of the user's code or of an engine
is always the `__cause__`.
"""

from __future__ import annotations


class WorkerGroupError(RuntimeError):
    """Base of this package's errors."""


class PoolNotPlacedError(WorkerGroupError):
    """A pool's placement group could not be created; the message names the missing resources."""


class WorkerLostError(WorkerGroupError):
    """A role process exited or cannot be reached."""


class WorkerOutOfMemoryError(WorkerGroupError):
    """A role process was terminated because its node ran out of memory."""


class WorkerFailedError(WorkerGroupError):
    """A worker's method raised; `__cause__` is what it raised."""


class CallTimeoutError(WorkerGroupError):
    """A call was not answered within its limit."""


class WorkerImportError(WorkerGroupError):
    """A user-defined worker class cannot be imported, or lacks the method that a hook names; the message says where."""


class HookFailedError(WorkerGroupError):
    """A user-defined worker failed in a hook; `__cause__` names the process."""
