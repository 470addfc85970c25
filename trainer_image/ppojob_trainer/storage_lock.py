"""One writer for each file or folder, among all pods that share the storage.

The fetch takes a lock for each folder, the data one for each file of its cache. It publishes nothing itself.

    no lock file   --- exclusive creation ---> held: its content changes every few seconds (heartbeat)
    another's      --- its content has not changed for a minute ---> renamed away, and then created exclusively

flock is unreliable on network file systems; exclusive creation and rename are not. No clocks are compared: a waiter
measures by its own how long the content stays the same. A holder that was suspended for so long finds out at its next
heartbeat, and its `check` raises before it publishes anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LockTimes:
    """Seconds."""

    beat: float = 5.0
    """Between two heartbeats."""
    stale: float = 60.0
    """After so long without one, the holder counts as ended."""
    poll: float = 2.0
    """Between two reads of a waiter."""


class LockLostError(RuntimeError):
    """Another process took the lock over, because this one was suspended for too long."""


class StorageLock:
    """The lock of one file or folder; it is a file beside it."""

    def __init__(self, path: Path, holder: str, times: LockTimes | None = None) -> None:
        """`holder` says who holds it, for those who wait."""
        self._path = path
        self._holder = holder
        self._times = times or LockTimes()
        self._id = uuid.uuid4().hex
        self._is_lost = threading.Event()
        self._ended = threading.Event()

    @contextmanager
    def held(self, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock.

        Args:
            on_wait: called with the holder's name for as long as somebody else has it.
        """
        self._acquire(on_wait)
        beating = threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True)
        beating.start()
        try:
            yield
        finally:
            self._ended.set()
            beating.join()
            self.release()

    def check(self) -> None:
        """Return if the lock is still held.

        Raises:
            LockLostError: another process has it.
        """
        if self._is_lost.is_set():
            raise LockLostError(
                f"another process took over the lock {self._path}, because this process was suspended for too long"
            )

    def release(self) -> None:
        """Remove the lock file, if it is ours. A process that is being ended calls it too."""
        with contextlib.suppress(OSError):
            if self._id_in(self._path.read_text()) == self._id:
                self._path.unlink()

    def _acquire(self, on_wait: Callable[[str], None]) -> None:
        seen, since = "", time.monotonic()
        while not self._create():
            try:
                content = self._path.read_text()
            except FileNotFoundError:
                continue
            if content != seen:
                seen, since = content, time.monotonic()
            if time.monotonic() - since >= self._times.stale:
                self._take_away(seen)
                continue
            on_wait(self._holder_in(content))
            time.sleep(self._times.poll)

    def _create(self) -> bool:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._path.open("x") as file:
                file.write(self._content(0))
        except FileExistsError:
            return False
        return True

    def _take_away(self, seen: str) -> None:
        """Rename a stale lock away. Where a live one was caught, because somebody was quicker, it is put back."""
        aside = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        if aside.read_text() != seen:
            # Fails where there is a newer lock; the holder of this one then finds out at its next heartbeat.
            with contextlib.suppress(FileExistsError):
                os.link(aside, self._path)
        aside.unlink()

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(self._times.beat):
            count += 1
            try:
                is_ours = self._wrote(count)
            except FileNotFoundError:
                is_ours = False
            except OSError:  # A network file system may be unavailable for a moment.
                is_ours = True
            if not is_ours:
                self._is_lost.set()
                return

    def _wrote(self, count: int) -> bool:
        """Write a heartbeat into the same file, as after a takeover another one has the name; return if it is ours."""
        with self._path.open("r+") as file:
            if self._id_in(file.read()) != self._id:
                return False
            file.seek(0)
            file.write(self._content(count))
            file.truncate()
        return True

    def _content(self, count: int) -> str:
        return json.dumps({"holder": self._holder, "id": self._id, "heartbeat": count})

    @staticmethod
    def _id_in(content: str) -> str:
        with contextlib.suppress(ValueError, AttributeError):
            return str(json.loads(content).get("id", ""))
        return ""

    @staticmethod
    def _holder_in(content: str) -> str:
        with contextlib.suppress(ValueError, AttributeError):
            return str(json.loads(content).get("holder", ""))
        return "another process"
