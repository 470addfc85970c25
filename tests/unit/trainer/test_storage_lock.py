"""One writer for each file or folder: others wait, a stale lock is taken over, and its old holder notices."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ppojob_trainer import storage_lock
from ppojob_trainer.storage_lock import LockLostError, LockTimes, StorageLock

LIMIT_SECONDS = 120.0
FAST = LockTimes(beat=0.2, stale=2 * LIMIT_SECONDS, poll=0.1)
OF_THE_DEAD = replace(FAST, stale=2.0)
"""Where the holder never lived: nobody can be taken for dead by mistake."""


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


class Clock:
    """In place of `time` for those who wait: a minute passes with each of their pauses, but only while `runs`.

    So no holder counts as dead because the machine is busy.
    """

    def __init__(self, runs: Callable[[], object]) -> None:
        self.now, self._runs = 0.0, runs

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        time.sleep(0.02)
        if self._runs():
            self.now += 60.0


def content_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_living_holder_keeps_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen, end = tmp_path / ".lock", [""], time.monotonic() + LIMIT_SECONDS

    def has_beaten() -> bool:
        before, seen[0] = seen[0], content_of(path)
        return seen[0] != before

    def wait(holder: str) -> None:
        assert time.monotonic() < end, "the holder's heartbeat is missing"
        if clock.now > 2 * FAST.stale:
            raise _GaveUp

    clock = Clock(has_beaten)
    monkeypatch.setattr(storage_lock, "time", clock)
    lock = StorageLock(path, "a/first", FAST)
    with lock.held(nobody):
        with pytest.raises(_GaveUp), StorageLock(path, "a/second", FAST).held(wait):
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


def test_one_of_many_takes_a_stale_lock_over_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, inside, most = tmp_path / ".lock", [], []
    dead = json.dumps({"holder": "a/dead", "id": "x", "heartbeat": 7})
    path.write_text(dead)
    clock = Clock(lambda: content_of(path) == dead)
    monkeypatch.setattr(storage_lock, "time", clock)

    def run(number: int) -> None:
        with StorageLock(path, f"a/{number}", FAST).held(lambda holder: None):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.2)
            inside.remove(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)

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
