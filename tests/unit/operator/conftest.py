"""The event loop of the operator's tests: a real one, or for the marker `virtual_time` one whose clock jumps."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.unit.operator.virtual_time import VirtualTimeLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the one loop that the test runs in."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual time": VirtualTimeLoop}
    return {"real time": asyncio.new_event_loop}
