"""Runs parts that belong together: all until one is asked to stop or ends, and then all end.

`main.py` runs the process' parts so, and `leader_tasks.py` those of the leader. It knows nothing of either.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

_STOP_SECONDS = 25.0


async def supervise(stop: asyncio.Event, parts: dict[str, Coroutine[Any, Any, None]]) -> None:
    """Run the parts until `stop` is set; then give them time to end in order.

    Where this is cancelled, the parts are cancelled and awaited.

    Raises:
        RuntimeError: a part ended by itself, or did not end in time.
    """
    tasks = {asyncio.create_task(part, name=name) for name, part in parts.items()}
    try:
        first, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        was_asked = stop.is_set()
        stop.set()
        done, late = await asyncio.wait(tasks, timeout=_STOP_SECONDS)
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    for task in done:
        if (error := task.exception()) is not None:
            raise RuntimeError(f"{task.get_name()} failed") from error
    if not was_asked:
        raise RuntimeError(f"{_names(first)} ended by itself")
    if late:
        raise RuntimeError(f"{_names(late)} did not end in {_STOP_SECONDS:g} s")


def _names(tasks: set[asyncio.Task[None]]) -> str:
    return ", ".join(sorted(task.get_name() for task in tasks))
