"""The programs of the wheel, `ppojob` and `kubectl-ppo`: which extra brings a package that is missing.

The wheel alone brings pydantic; extras bring the rest. Without this module a command that needs more would end with a
traceback. It imports nothing before it is called.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def ppojob() -> None:
    """Run `ppojob`."""
    with _extra_named("trainer (NVIDIA GPUs) or trainer-cpu; validate, convert and plot need the extra kubectl alone"):
        from ppojob_trainer.cli import main

        main()


def kubectl_ppo() -> None:
    """Run `kubectl-ppo`."""
    with _extra_named("kubectl"):
        from ppojob_trainer.kubectl.app import main

        main()


@contextmanager
def _extra_named(extra: str) -> Iterator[None]:
    """Turn a missing package of others into a sentence and exit code 1; a missing module of ours is a bug."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("ppojob"):
            raise
        sys.exit(f"error: the Python package {package} is missing: install ppojob with the extra {extra}")
