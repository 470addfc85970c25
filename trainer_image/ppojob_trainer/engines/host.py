"""The memory that this process shares with the others of its pod or machine. Called by the roles."""

from __future__ import annotations

import os
from pathlib import Path

# Of cgroup v2, and of v1, whose "no limit" is a number larger than any memory.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_bytes(limits: tuple[Path, ...] = _LIMITS) -> int:
    """Return the smaller of the machine's memory and the pod's limit, in bytes."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in limits:
        text = file.read_text(encoding="ascii").strip() if file.exists() else ""
        if text.isdecimal():
            found.append(int(text))
    return min(found)
