"""Why models or data could not be fetched; the message has the field, the address and the remedy."""

from __future__ import annotations

import errno

_PERMANENT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG)


class FetchError(RuntimeError):
    """A try failed; another may succeed."""


class FetchRefusedError(FetchError):
    """No other try can help: the spec, the access, the data or the storage has to change."""


def of_storage(error: OSError, what: str) -> FetchError:
    """Return the error for a failed write or read of the storage."""
    kind = FetchRefusedError if error.errno in _PERMANENT_ERRNOS else FetchError
    return kind(f"{what}: the storage cannot be written: {error}")
