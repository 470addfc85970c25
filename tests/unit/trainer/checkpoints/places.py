"""Where the stores are tested: a folder, and a bucket in this process's memory, both written and looked at alike."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

import obstore
from obstore.store import MemoryStore

from ppojob_trainer.checkpoints import Checkpoint, CheckpointStore, open_store


class Place(Protocol):
    """A place for checkpoints. Locations are folders or addresses."""

    root: str
    owner: str
    """Name of the file that says who may write."""
    nothing: str
    """The message about a location that does not exist."""

    def name(self, step: int, attempt: int = 0) -> str:
        """Return the name of a checkpoint."""
        ...

    def write(self, location: str, text: str) -> None: ...

    def text(self, location: str) -> str: ...

    def remove(self, location: str) -> None:
        """Remove a file, or all that is below a name."""
        ...

    def names(self, location: str) -> list[str]:
        """Return what lies side by side there."""
        ...


class FolderPlace:
    owner, nothing = "owner.json", "there is no such folder"

    def __init__(self, folder: Path) -> None:
        self.root = str(folder)

    def name(self, step: int, attempt: int = 0) -> str:
        return f"step-{step}"

    def write(self, location: str, text: str) -> None:
        path = Path(location)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def text(self, location: str) -> str:
        return Path(location).read_text()

    def remove(self, location: str) -> None:
        path = Path(location)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def names(self, location: str) -> list[str]:
        return sorted(path.name for path in Path(location).iterdir())


class BucketPlace:
    owner, nothing = "tracker.json", "there is nothing below this address"

    def __init__(self, store: MemoryStore, root: str = "s3://bucket/team/job") -> None:
        self.root = root
        self.store = store

    def name(self, step: int, attempt: int = 0) -> str:
        return f"step-{step}.attempt-{attempt}"

    def write(self, location: str, text: str) -> None:
        obstore.put(self.store, _key(location), text.encode())

    def text(self, location: str) -> str:
        return bytes(obstore.get(self.store, _key(location)).bytes()).decode()

    def remove(self, location: str) -> None:
        keys = [_key(location), *self.keys(_key(location))]
        obstore.delete(self.store, keys)

    def names(self, location: str) -> list[str]:
        start = len(_key(location)) + 1
        return sorted({key[start:].partition("/")[0] for key in self.keys(_key(location))})

    def keys(self, prefix: str | None = None) -> list[str]:
        return [found["path"] for page in obstore.list(self.store, prefix=prefix) for found in page]


def claimed(
    location: str, *, attempt: int = 0, uid: str = "u", adopts: bool = False, adopted_uid: str | None = None
) -> CheckpointStore:
    """Return a store that has claimed its place."""
    store = open_store(location, uid=uid, attempt=attempt)
    store.claim(adopts=adopts, adopted_uid=adopted_uid)
    return store


def save(place: Place, store: CheckpointStore, step: int, *, keep: int = 10) -> Checkpoint:
    """Save a checkpoint of one shard."""
    place.write(f"{store.begin(step)}/shard-0", f"weights of step {step}")
    return store.commit(step, state={"position": step}, keep=keep)


def _key(location: str) -> str:
    return location.removeprefix("s3://bucket/").removeprefix("s3://bucket")
