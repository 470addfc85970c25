"""A disk without room, as the kernel has it: a write is done in part, and the next one is refused."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def room_for(path: Path, num_bytes: int) -> Iterator[None]:
    """Let no file of this process become larger than the file at `path` is now, plus so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
