"""Saves a checkpoint and exits before the first, second, third ... call that changes the disk; one process for each.

`test_kills.py` runs it: `python kills.py FOLDER SCENARIO`. It forks, so it must not be imported into pytest's process.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppojob_trainer.checkpoints.folder_store import FolderStore

CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "open")
KILLED = 9


def save(store: FolderStore, step: int, keep: int = 1) -> None:
    """Save a checkpoint of two shards."""
    folder = Path(store.begin(step))
    for role in ("actor", "critic"):
        (folder / role).mkdir()
        (folder / role / "shard-0").write_text(f"{role} at {step}")
    store.commit(step, state={"data": step}, keep=keep)


def die_at(count: int) -> None:
    """End this process without a word before the given call that changes the disk."""
    left = [count]

    def armed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os._exit(KILLED)
            return call(*args, **options)

        return wrapper

    for name in CALLS:
        setattr(os, name, armed(getattr(os, name)))


def prepare(folder: Path, scenario: str) -> FolderStore:
    """Make what stands before the kill, and return the store of the attempt that will be killed."""
    store = FolderStore(folder, uid="u", attempt=1)
    store.claim()
    if scenario != "first":
        save(store, 4)
    return store


def main() -> int:
    """Make one folder for each point at which a process can exit; the last one is of a process that completed."""
    base, scenario = Path(sys.argv[1]), sys.argv[2]
    # A kill takes nothing out of the kernel's cache, so the disk need not be waited for; the call still counts.
    os.fsync = lambda fd: None
    step = 4 if scenario in ("first", "again") else 8
    for count in range(1000):
        folder = base / f"{count}"
        store = prepare(folder, scenario)
        child = os.fork()
        if child == 0:
            die_at(count)
            save(store, step)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            return 0
        if os.waitstatus_to_exitcode(status) != KILLED:
            return 1
    shutil.rmtree(base)
    return 1


if __name__ == "__main__":
    sys.exit(main())
