"""A file that grows by whole texts: one that a full disk refuses is left out, and no part of it stays."""

import contextlib
import os
from pathlib import Path


class AppendedFile:
    """Appends to a file of one writer; it is created if there is none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def append(self, text: str, *, is_synced: bool = False) -> None:
        """Append a text; wait until the disk has it if `is_synced`.

        Raises:
            OSError: it could not be written. The file is as it was before, if it can be shortened.
        """
        number, left = self._file.fileno(), memoryview(text.encode())
        size = os.fstat(number).st_size
        try:
            while left:
                left = left[self._file.write(left) :]
            if is_synced:
                os.fsync(number)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(number, size)
            raise

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._file.closed

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        self._file.close()
