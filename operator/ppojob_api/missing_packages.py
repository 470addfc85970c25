"""Says which extra brings a package that is missing, for the programs of the wheel.

The wheel alone brings pydantic; extras bring the rest. Without this a program that needs more ends with a traceback.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def name_the_extra(extra: str) -> Iterator[None]:
    """Turn a missing package of others into a sentence and exit code 1; a missing module of ours is a bug.

    Args:
        extra: the extra of this project that brings the packages, in words.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("ppojob"):
            raise
        sys.exit(f"error: the Python package {package} is missing: install ppojob with the extra {extra}")
