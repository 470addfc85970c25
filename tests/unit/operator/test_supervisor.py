"""Parts that belong together begin and end together."""

import asyncio

import pytest

from ppojob_operator import supervisor
from ppojob_operator.supervisor import supervise


async def waiting(stop: asyncio.Event) -> None:
    """A part that ends when it is asked to."""
    await stop.wait()


async def ending() -> None:
    """A part that ends by itself."""


async def failing() -> None:
    """A part that breaks."""
    raise OSError("port taken")


async def endless() -> None:
    """A part that does not end."""
    await asyncio.sleep(3600)


async def test_all_parts_end_when_asked() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stop.set)

    await supervise(stop, {"a": waiting(stop), "b": waiting(stop)})


async def test_a_part_that_ends_by_itself_ends_the_process_and_the_others_gracefully() -> None:
    stop = asyncio.Event()

    with pytest.raises(RuntimeError, match="a ended by itself"):
        await supervise(stop, {"a": ending(), "b": waiting(stop)})

    assert stop.is_set()


async def test_a_part_that_breaks_is_named_with_its_cause() -> None:
    stop = asyncio.Event()

    with pytest.raises(RuntimeError, match="b failed") as caught:
        await supervise(stop, {"a": waiting(stop), "b": failing()})

    assert str(caught.value.__cause__) == "port taken"


async def test_a_part_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_STOP_SECONDS", 0.05)
    stop = asyncio.Event()
    stop.set()

    with pytest.raises(RuntimeError, match=r"b did not end in 0\.05 s"):
        await supervise(stop, {"a": waiting(stop), "b": endless()})


async def test_all_parts_end_where_the_whole_is_cancelled() -> None:
    ended: list[str] = []

    async def careful(name: str) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            ended.append(name)

    whole = asyncio.create_task(supervise(asyncio.Event(), {"a": careful("a"), "b": careful("b")}))
    await asyncio.sleep(0.01)
    whole.cancel()

    with pytest.raises(asyncio.CancelledError):
        await whole
    assert sorted(ended) == ["a", "b"]
