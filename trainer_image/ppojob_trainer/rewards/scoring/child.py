"""A process that runs a reward function: `python -m ppojob_trainer.rewards.scoring.child FD`.

Started by `processes`, with whom it shares a socket. A plain function runs in the main thread, one response at a time,
as some libraries set alarms. The calls of a coroutine function share an event loop. A second thread reads the socket:
when the parent ends, so does this process with everything that it has started.
"""

from __future__ import annotations

import asyncio
import faulthandler
import math
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from ppojob_trainer.rewards.errors import RewardImportError, RewardRefusedError
from ppojob_trainer.rewards.interface import ComputeScore, Extra
from ppojob_trainer.rewards.loader import ARGUMENTS, check_reward_function, is_coroutine_function, load_reward_function
from ppojob_trainer.rewards.scoring.messages import Answer, Ready, Refused, Setup, Work

_MAX_TEXT = 2_000


def main(descriptor: int) -> None:
    """Load the function, then score until the parent closes the socket."""
    os.set_inheritable(descriptor, False)
    connection: Connection[Any, Any] = Connection(descriptor)
    # The parent asks for the stack before it ends a process that hangs; this works inside C code, too.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    setup: Setup = connection.recv()
    sys.path[:] = setup.search_path
    try:
        function = load_reward_function(setup.source)
        if setup.data_sources is not None:
            check_reward_function(setup.source, setup.data_sources)
    except (RewardImportError, RewardRefusedError) as error:
        connection.send(Refused(str(error), isinstance(error, RewardImportError)))
        return
    is_async = is_coroutine_function(function)
    connection.send(Ready(is_async))
    if is_async:
        asyncio.run(_score_in_loop(function, connection, setup.timeout_seconds))
    else:
        _score_in_turn(function, connection)


def _score_in_turn(function: ComputeScore, connection: Connection[Any, Any]) -> None:
    waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
    _read_in_thread(connection, waiting.put)
    while True:
        work = waiting.get()
        try:
            answer = _answer(work.number, function(**_arguments(work)))
        except BaseException as error:  # noqa: BLE001 - user code; a SystemExit, too, is a failure of this response
            answer = Answer(work.number, error=_reason(error))
        connection.send(answer)


async def _score_in_loop(function: ComputeScore, connection: Connection[Any, Any], limit_s: float) -> None:
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[Work] = asyncio.Queue()
    _read_in_thread(connection, lambda work: loop.call_soon_threadsafe(waiting.put_nowait, work))
    running: set[asyncio.Task[Any]] = set()

    async def call(work: Work) -> Answer:
        try:
            return _answer(work.number, await function(**_arguments(work)))  # type: ignore[misc]
        except BaseException as error:  # noqa: BLE001 - user code; a SystemExit would end the loop
            return Answer(work.number, error=_reason(error))

    async def score(work: Work) -> None:
        calling = asyncio.create_task(call(work))
        # Not `asyncio.timeout`: it waits for a coroutine that ignores its cancellation.
        done, _ = await asyncio.wait({calling}, timeout=limit_s)
        connection.send(calling.result() if done else Answer(work.number, is_timeout=True, error="timeout"))
        if not done:
            calling.cancel()
            running.add(calling)
            calling.add_done_callback(running.discard)

    while True:
        task = asyncio.create_task(score(await waiting.get()))
        running.add(task)
        task.add_done_callback(running.discard)


def _read_in_thread(connection: Connection[Any, Any], take: Callable[[Work], object]) -> None:
    def read() -> None:
        try:
            while True:
                take(connection.recv())
        except (EOFError, OSError):
            # The parent made this process the leader of a group.
            os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=read, name="reader", daemon=True).start()


def _arguments(work: Work) -> dict[str, Any]:
    item = pickle.loads(work.item)
    return {name: getattr(item, name) for name in ARGUMENTS}


def _answer(number: int, value: Any) -> Answer:
    extras: dict[str, Extra] = {}
    score = value
    if isinstance(value, Mapping):
        if "score" not in value:
            keys = sorted(map(str, value))
            return Answer(number, error=f"the reward function returned a dict without 'score': it has {keys}")
        score = value["score"]
        extras = {str(key): _plain(entry) for key, entry in value.items() if key != "score"}
    try:
        finite = math.nan if isinstance(score, str) else float(score)
    except (TypeError, ValueError):
        finite = math.nan
    if not math.isfinite(finite):
        text = repr(score)[:_MAX_TEXT]
        return Answer(number, error=f"the reward function returned {text}: a score is a finite number")
    return Answer(number, finite, extras)


def _plain(entry: Any) -> Extra:
    """Return a number or a text that the parent can read without the user's classes."""
    if entry is None or type(entry) in (bool, int, float, str):
        return entry  # type: ignore[no-any-return]
    if getattr(entry, "shape", None) == ():
        # A scalar of numpy or torch.
        return _plain(entry.item())
    return float(entry) if isinstance(entry, (int, float)) else str(entry)[:_MAX_TEXT]


def _reason(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"the reward function raised {type(error).__name__}: {str(error)[:_MAX_TEXT]}{line}"


if __name__ == "__main__":
    main(int(sys.argv[1]))
