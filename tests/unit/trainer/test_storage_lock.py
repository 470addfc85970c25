"""One writer for each file or folder: others wait, a stale lock is taken over, and its old holder notices."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ppojob_trainer.storage_lock import LockLostError, LockTimes, StorageLock

FAST = LockTimes(beat=0.2, stale=15.0, poll=0.1)
OF_THE_DEAD = replace(FAST, stale=2.0)
"""Where the holder never lived: nobody can be taken for dead by mistake."""
TO_WAIT_FOR = replace(FAST, stale=6.0)
"""Where a test waits for longer than that, and a living holder on a slow machine may not count as dead."""
LIMIT_SECONDS = 60.0


def nobody(holder: str) -> None:
    raise AssertionError(f"waited for {holder}")


def eventually(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_lock_is_a_file_for_as_long_as_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "folder" / ".lock"

    with StorageLock(path, "a/b", FAST).held(nobody):
        assert json.loads(path.read_text())["holder"] == "a/b"

    assert not path.exists()


def test_a_second_one_waits_and_knows_for_whom(tmp_path: Path) -> None:
    path, waited = tmp_path / ".lock", []
    first = StorageLock(path, "a/first", FAST)

    with first.held(nobody):

        def second() -> None:
            with StorageLock(path, "a/second", FAST).held(waited.append):
                order.append("second")

        order: list[str] = []
        thread = threading.Thread(target=second)
        thread.start()
        eventually(lambda: waited)
        order.append("first")
    thread.join(LIMIT_SECONDS)

    assert order == ["first", "second"]
    assert set(waited) == {"a/first"}


def test_a_living_holder_keeps_its_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = StorageLock(path, "a/first", TO_WAIT_FOR)
    waits = _LimitedWait(2 * TO_WAIT_FOR.stale)

    with lock.held(nobody):
        with pytest.raises(_GaveUp), StorageLock(path, "a/second", TO_WAIT_FOR).held(waits):
            raise AssertionError("it has the lock")
        lock.check()


def test_the_lock_of_a_dead_holder_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_text(json.dumps({"holder": "a/dead", "id": "x", "heartbeat": 7}))

    with StorageLock(path, "a/second", OF_THE_DEAD).held(_LimitedWait(LIMIT_SECONDS)):
        assert json.loads(path.read_text())["holder"] == "a/second"

    assert list(tmp_path.iterdir()) == []


def test_an_empty_lock_is_taken_over_too(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.touch()

    with StorageLock(path, "a/second", OF_THE_DEAD).held(_LimitedWait(LIMIT_SECONDS)):
        assert path.read_text()


def test_one_of_many_takes_a_stale_lock_over_at_a_time(tmp_path: Path) -> None:
    path, inside, most = tmp_path / ".lock", [], []
    path.write_text(json.dumps({"holder": "a/dead", "id": "x", "heartbeat": 7}))

    def run(number: int) -> None:
        with StorageLock(path, f"a/{number}", TO_WAIT_FOR).held(lambda holder: None):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.2)
            inside.remove(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert most == [1] * 6


def test_who_was_frozen_for_too_long_finds_out(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    lock = StorageLock(path, "a/frozen", FAST)

    with lock.held(nobody):
        path.write_text(json.dumps({"holder": "a/second", "id": "y", "heartbeat": 0}))
        with pytest.raises(LockLostError, match="took over the lock"):
            eventually(lock.check)

    assert json.loads(path.read_text())["holder"] == "a/second", "another's lock stays"


def test_a_live_lock_that_was_caught_by_mistake_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    live = json.dumps({"holder": "a/quicker", "id": "y", "heartbeat": 0})
    path.write_text(live)

    StorageLock(path, "a/slower", FAST)._take_away("what it was before")

    assert path.read_text() == live
    assert list(tmp_path.iterdir()) == [path]


class _GaveUp(Exception):
    """The waiter has waited long enough."""


class _LimitedWait:
    """Called while a lock is waited for; ends the wait after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self, holder: str) -> None:
        if time.monotonic() > self._end:
            raise _GaveUp
