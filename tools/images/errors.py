"""The failure of a command about images. `__main__` prints it and exits with 1."""

from __future__ import annotations


class ImageError(RuntimeError):
    """What is wrong, and what to do about it."""
