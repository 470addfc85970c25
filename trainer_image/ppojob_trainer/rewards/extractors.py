"""Which part of a response is the answer: small language models rarely give the answer alone.

Used by reward functions that offer `extract`. An extractor returns None where the response has no such part.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

# A minus belongs to the number only if no digit stands before it: "10-3" ends in 3, "= -4" in -4.
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")
_BOXED = "\\boxed{"


def whole(text: str) -> str | None:
    """The response without the white space around it."""
    return text.strip() or None


def last_number(text: str) -> str | None:
    """The last number: "3 + 4 = 7." gives "7", "1,234 apples" gives "1234"."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return numbers[-1].replace(",", "") if numbers else None


def last_line(text: str) -> str | None:
    """The last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}, inner braces included; None if it is not closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    begin, depth = start + len(_BOXED), 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return None


EXTRACTORS: Final[dict[str, Callable[[str], str | None]]] = {
    "whole": whole,
    "last_number": last_number,
    "last_line": last_line,
    "boxed": boxed,
}


def extract_answer(text: str, extract: str) -> str | None:
    """Apply the extractor of that name.

    Raises:
        ValueError: there is none; says which there are.
    """
    if extract not in EXTRACTORS:
        raise ValueError(f"unknown extract {extract!r}: choose one of {', '.join(EXTRACTORS)}")
    return EXTRACTORS[extract](text)
