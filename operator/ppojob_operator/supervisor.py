"""Runs several tasks until they are asked to stop. If one ends early, all are stopped.

`main.py` runs the tasks of the process with it, `leader_tasks.py` those of the leader. It knows nothing about either.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

_STOP_SECONDS = 25.0


async def supervise(stop: asyncio.Event, parts: dict[str, Coroutine[Any, Any, None]]) -> None:
    """Run the tasks until `stop` is set; then wait for their graceful stop, for a limited time.

    If this is cancelled, the tasks are cancelled and awaited.

    Raises:
        RuntimeError: a task ended early, or did not end in time.
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
