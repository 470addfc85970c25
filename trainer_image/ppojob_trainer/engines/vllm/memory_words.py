"""What vLLM says where its GPU has too little memory.

Its own processes say it, in their log: what reaches the caller is often no more than that they ended. Called by the
rollout role.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["about_memory", "end_of"]

_LITTLE_MEMORY = re.compile(r"out of memory|is less than desired GPU memory utilization", re.IGNORECASE)
_BEFORE_THE_WORDS = re.compile(
    r"^(\([^()]*pid=\d+\) *)?([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] *)?([\w.]*(Error|Exception): *)?"
)
_END_OF_LOG = 20_000


def about_memory(text: str) -> str | None:
    """Return the last sentence of vLLM's that says that its GPU has too little memory, or None."""
    found = [line for line in text.splitlines() if _LITTLE_MEMORY.search(line)]
    if not found:
        return None
    # Without the name of vLLM's process, the time, and the class of the error.
    return _BEFORE_THE_WORDS.sub("", found[-1]).strip()


def end_of(file: Path) -> str:
    """Return the end of a log; empty where it cannot be read."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - _END_OF_LOG))
            return log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
