"""Patterns of text fields, each with the words that an error says instead of the regular expression."""

from typing import Any

from pydantic import Field

REMEDY_OF: dict[str, str] = {}
"""What to write, by pattern. Each pattern of the spec is in it: `spelled` puts it there."""


def spelled(pattern: str, remedy: str, **more: Any) -> Any:
    """Return a field whose text must match a pattern.

    Args:
        pattern: regular expression, as in OpenAPI.
        remedy: what a correct text looks like, with "must".
        more: other arguments of pydantic's Field.
    """
    REMEDY_OF[pattern] = remedy
    return Field(pattern=pattern, **more)
