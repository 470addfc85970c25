"""The fetch of everything that a job names by address.

    for each address that is not complete: list its files; refuse a model that cannot be trained, by its config.json
    compare all sizes with the free space
    for each address, data first: take its lock, download, check data, publish the folder by a rename

What is complete is not asked for again, so a job whose sources are in the storage needs no network.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ppojob_api.v1alpha1.reported import SourceStatus
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_api.v1alpha1.sources import Source, SourceKind, hub_address
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.commands.fetch.buckets import BucketPlace
from ppojob_trainer.commands.fetch.checks import CONFIG, check_config, check_data, files_of
from ppojob_trainer.commands.fetch.errors import FetchError, FetchRefusedError, of_storage
from ppojob_trainer.commands.fetch.folders import SourceFolder
from ppojob_trainer.commands.fetch.hub import HubPlace
from ppojob_trainer.commands.fetch.listing import Listing, Place
from ppojob_trainer.storage_lock import LockLostError, LockTimes, StorageLock

logger = logging.getLogger(__name__)

_PARALLEL_FILES = 4
_GB = 1e9


@dataclass
class State:
    """How far a fetch is; another thread reads it for reports."""

    sources: list[SourceStatus] = field(default_factory=list)
    """What is complete."""
    address: str | None = None
    """What is fetched at the moment."""
    folder: SourceFolder | None = None
    """Its folder."""
    message: str | None = None
    """What it waits for."""
    total: int | None = None
    """Bytes of all addresses, once they are known."""
    lock: StorageLock | None = None
    """The lock that is held."""

    @property
    def done(self) -> int:
        """Bytes that are in the storage."""
        folder = self.folder
        return sum(source.bytes for source in self.sources) + (folder.size() if folder is not None else 0)


@dataclass(frozen=True)
class _Task:
    """An address whose folder is not complete."""

    folder: SourceFolder
    place: Place
    listing: Listing


def fetch_all(job: JobFile, state: State, holder: str, times: LockTimes | None = None) -> None:
    """Fetch what the job names by address, and leave what was found in `state`.

    Args:
        job: with local paths, and what belongs there.
        state: filled while it runs.
        holder: name of this fetch, for others that wait for it.

    Raises:
        FetchError: a try failed; FetchRefusedError if another one cannot help.
    """
    # Data first: a wrong column is found before a model's weights are downloaded.
    sources = sorted(job.sources, key=lambda source: source.kind is SourceKind.MODEL)
    tasks = []
    for source in sources:
        folder = SourceFolder(source)
        found = folder.found()
        if found is not None:
            state.sources.append(found)
        else:
            state.address = source.address
            tasks.append(_planned(job.spec, folder))
    state.total = sum(task.listing.size for task in tasks) + sum(source.bytes for source in state.sources)
    _refuse_without_space(tasks, Path(job.spec.storage.mount_path))
    is_checked = _check_data(job, sources, is_checked=False) if not tasks else False
    for task in tasks:
        if task.folder.source.kind is SourceKind.MODEL:
            is_checked = _check_data(job, sources, is_checked=is_checked)
        state.sources.append(_fetched(task, state, holder, times))
    _check_data(job, sources, is_checked=is_checked)
    state.address, state.folder, state.message = None, None, None


def _check_data(job: JobFile, sources: Sequence[Source], *, is_checked: bool) -> bool:
    if not is_checked:
        check_data(job.spec, sources)
    return True


def _planned(spec: PPOJobSpec, folder: SourceFolder) -> _Task:
    """List an address. A model's configuration is read in a folder of this pod: the storage's is not locked yet."""
    source = folder.source
    hub = hub_address(source.address)
    place: Place = BucketPlace(source) if hub is None else HubPlace(source, hub)
    listing = files_of(source, place.listing())
    if source.kind is SourceKind.MODEL:
        [config] = [file for file in listing.files if file.name == CONFIG]
        with tempfile.TemporaryDirectory() as here:
            place.download(config, listing, Path(here), lambda: None)
            check_config(spec, source, Path(here))
    return _Task(folder, place, listing)


def _refuse_without_space(tasks: Sequence[_Task], storage: Path) -> None:
    needed = sum(task.listing.size - min(task.folder.size(), task.listing.size) for task in tasks)
    existing = next(path for path in (storage, *storage.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        addresses = ", ".join(task.folder.source.address for task in tasks)
        raise FetchRefusedError(
            f"the storage at {storage} has {free / _GB:.2f} GB free, and {needed / _GB:.2f} GB are needed for "
            f"{addresses}: enlarge the claim, or remove folders below {storage}/sources that no job needs"
        )


def _fetched(task: _Task, state: State, holder: str, times: LockTimes | None) -> SourceStatus:
    folder, source = task.folder, task.folder.source
    lock = StorageLock(folder.lock, holder, times)
    state.address, state.folder, state.message = source.address, folder, None

    def waits(other: str) -> None:
        state.message = f"waits for {other}, which fetches the same"

    try:
        with lock.held(waits):
            state.lock, state.message = lock, None
            # The previous holder of the lock may have fetched it.
            found = folder.found()
            if found is None:
                logger.info("fetching %s into %s: %.2f GB", source.address, folder.path, task.listing.size / _GB)
                folder.begin(task.listing)
                _download(task, lock)
                _check(lock)
                found = folder.publish(task.listing)
            state.folder, state.lock = None, None
            return found
    except OSError as error:
        raise of_storage(error, f"spec.{source.fields[0]} {source.address}") from error


def _check(lock: StorageLock) -> None:
    """Return if the lock is still held.

    Raises:
        FetchError: another fetch has taken it over.
    """
    try:
        lock.check()
    except LockLostError as error:
        raise FetchError(str(error)) from error


def _download(task: _Task, lock: StorageLock) -> None:
    check = partial(_check, lock)
    with ThreadPoolExecutor(_PARALLEL_FILES, thread_name_prefix="fetch") as pool:
        running = [
            pool.submit(task.place.download, file, task.listing, task.folder.incomplete, check)
            for file in task.listing.files
        ]
        try:
            for each in running:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for file in task.listing.files:
        path = task.folder.incomplete / file.name
        if path.stat().st_size != file.size:
            path.unlink()
            raise FetchError(f"{path} does not have its {file.size} bytes")
