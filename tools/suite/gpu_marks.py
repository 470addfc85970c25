"""What a test says of the GPUs that it needs, by its mark `gpu`. Read by `gpus` and by the tests' conftest.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Needs:
    """`pytest.mark.gpu(num_gpus, capability=(major, minor))`: GPUs of this compute capability or a newer one."""

    num_gpus: int = 1
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, test: pytest.Item) -> Needs:
        """Return what a test needs; the mark that is closest to it decides.

        Raises:
            TypeError: the test has no such mark, or one with other arguments.
        """
        mark = test.get_closest_marker("gpu")
        if mark is None:
            raise TypeError(f"{test.nodeid} does not say how many GPUs it needs: mark it with pytest.mark.gpu")
        return cls(*mark.args, **mark.kwargs)
