"""Reward functions that behave badly, for the tests of scoring; loaded by path in separate processes."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

FOR_EVER = 10**6


def meets(*, solution_str: str, marks: str, **_: Any) -> float:
    """Return 1 as soon as so many processes as the response says have one at the same time."""
    Path(marks, f"{os.getpid()}").touch()
    while len(list(Path(marks).iterdir())) < int(solution_str):
        time.sleep(0.02)
    return 1.0


def compute_score(*, solution_str: str, marks: str = "", **_: Any) -> Any:
    """Do what the response says, else return its length."""
    if marks:
        Path(marks, f"{os.getpid()}").touch()
    match solution_str.split():
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["hang"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(FOR_EVER)
        case ["child"]:
            started = subprocess.Popen(["sleep", str(FOR_EVER)])
            Path(marks, "child").write_text(str(started.pid))
            time.sleep(FOR_EVER)
        case ["exit"]:
            os._exit(3)
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["raise", name]:
            raise RAISED[name]
        case ["return", name]:
            return RETURNED[name]
    return len(solution_str)


class Own:
    """A class that only this process knows."""

    def __str__(self) -> str:
        return "mine"


RETURNED = {
    "dict": {"score": True, "answer": "4", "size": 2, "own": Own(), "none": None},
    "none": None,
    "text": "0.5",
    "nan": float("nan"),
    "infinite": float("inf"),
    "list": [1, 2],
    "no-score": {"value": 1},
    "none-score": {"score": None},
}


RAISED = {"key": KeyError("bad"), "exit": SystemExit(3)}


num_judged = 0
LATER_S = FOR_EVER / 2


async def judged(*, solution_str: str, bonus: float = 0.0, others: int = 0, marks: str = "", **_: Any) -> Any:
    """A coroutine function; see `compute_score`.

    Args:
        others: after so many other responses, the loop's clock shows `LATER_S` more for one that never ends.
    """
    global num_judged
    if solution_str in ("hang", "stubborn"):
        while num_judged < others:
            await asyncio.sleep(0.01)
        loop: Any = asyncio.get_running_loop()
        loop.time = lambda: time.monotonic() + LATER_S
    match solution_str.split():
        case ["hang"]:
            await asyncio.sleep(FOR_EVER)
        case ["stubborn"]:
            while True:
                try:
                    await asyncio.sleep(FOR_EVER)
                except asyncio.CancelledError:
                    continue
        case ["block"]:
            Path(marks, f"{os.getpid()}").touch()
            time.sleep(FOR_EVER)
        case ["exit"]:
            os._exit(3)
        case ["raise", name]:
            raise RAISED[name]
    await asyncio.sleep(0.01)
    num_judged += 1
    return {"score": len(solution_str) + bonus, "length": len(solution_str)}


running = 0
most = 0
have_met = asyncio.Event()


async def counts(*, expected: int, **_: Any) -> float:
    """Return the most calls that were ever running at the same time; the first ones wait until `expected` run."""
    global running, most
    running += 1
    most = max(most, running)
    if running == expected:
        have_met.set()
    await asyncio.wait_for(have_met.wait(), 60)
    # A call beyond the expected ones would start now.
    await asyncio.sleep(0.02)
    running -= 1
    return most


def loads_torch(**_: Any) -> float:
    """Return 1 if torch is in this process."""
    import sys

    return float("torch" in sys.modules)
