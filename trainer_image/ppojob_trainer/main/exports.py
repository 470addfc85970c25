"""The exports of a run: the actor's ranks write a folder, the driver completes it, names it and uploads it.

Implements `controller.ports.ExportPort` for `run`. A folder appears complete, by a rename. An upload that fails loses
neither the run nor the folder: it is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.reported import UploadFailure
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_api.v1alpha1.training import ExportPolicy
from ppojob_trainer.controller.monitor_port import Uploaded
from ppojob_trainer.exports import UploadError, UploadFailedError, complete, open_target, upload
from ppojob_trainer.exports.target import Export
from ppojob_trainer.main.groups import Groups
from ppojob_trainer.telemetry import RunFiles
from ppojob_trainer.worker_groups.roles.actor import ActorWorker

__all__ = ["JobExports", "check_target"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STEP = re.compile(r"step-(\d+)")
_MAX_MESSAGE = 4000


def check_target(job: JobFile) -> None:
    """Find out before anything starts whether the job may upload its exports.

    Raises:
        UploadRefusedError: it may not. A target that does not answer is only logged: it is needed much later.
    """
    target = job.spec.checkpoint.export_to
    if target is None:
        return
    try:
        open_target(target).check(job.uid)
    except UploadFailedError as error:
        logger.warning("the exports may not be uploaded: %s", error)


class JobExports:
    """See the module's docstring."""

    def __init__(
        self, job: JobFile, groups: Groups, files: RunFiles, attempt: int, on_file: Callable[[], None]
    ) -> None:
        """`on_file` is called in the event loop after each uploaded file, as a sign of life."""
        self._job = job
        self._groups = groups
        self._files = files
        self._attempt = attempt
        self._on_file = on_file
        self._is_each = job.spec.checkpoint.export is ExportPolicy.EACH

    async def export(self, step: int, keep: int) -> Path:
        """See `ExportPort`."""
        target = self._folder(step)
        await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.tmp-{self._attempt}")
        await asyncio.to_thread(_remove_incomplete, target, self._attempt)
        await self._groups.actor.group.call(ActorWorker.export, aside)
        await asyncio.to_thread(complete, aside, self._job, step)
        await asyncio.to_thread(_replace, aside, target)
        if self._is_each:
            await asyncio.to_thread(_keep, self._files.models, step, keep)
        return target

    def newest(self, step: int) -> int | None:
        """See `ExportPort`."""
        known = _steps(self._files.models).values() if self._is_each else ()
        return max((number for number in known if number <= step), default=None)

    async def upload(self, step: int) -> Uploaded:
        """See `ExportPort`."""
        address = self._job.spec.checkpoint.export_to
        assert address is not None, "the loop uploads only for a job with checkpoint.exportTo"
        export = Export(self._folder(step), step, self._job.uid, has_own_place=self._is_each)
        loop = asyncio.get_running_loop()

        def on_file() -> None:
            # The loop may have ended without waiting for the upload.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_file)

        try:
            return Uploaded(await _in_thread(lambda: upload(open_target(address), export, on_file)))
        except UploadError as error:
            return self._failed(error.reason, str(error), export.folder)
        except Exception as error:
            # Whatever it is, it must not end a run whose model is in the storage.
            logger.exception("the upload to %s failed", address)
            said = f"checkpoint.exportTo {address}: {type(error).__name__}: {error}"
            return self._failed(Reason.UPLOAD_FAILED, said, export.folder)

    def _failed(self, reason: str, said: str, folder: Path) -> Uploaded:
        is_on_cluster = self._job.reporting is not None
        hint = f"; copy it with kubectl ppo model {self._job.name} -o DIR" if is_on_cluster else ""
        remedy = f"the model is in {folder}{hint}"
        return Uploaded(None, UploadFailure(reason=reason, message=f"{said[:_MAX_MESSAGE]}; {remedy}"[:4096]))

    def _folder(self, step: int) -> Path:
        return self._files.model_of(step) if self._is_each else self._files.model


async def _in_thread(work: Callable[[], T]) -> T:
    """Await `work` in a thread that does not delay the end of the process, as those of `asyncio.to_thread` do."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not done.cancelled():
            set_it()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised in the event loop
            reason = error
            outcome = lambda: done.set_exception(reason)  # noqa: E731
        else:
            outcome = lambda: done.set_result(result)  # noqa: E731
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="upload", daemon=True).start()
    return await done


def _steps(folder: Path) -> dict[Path, int]:
    """Return the exports in a folder with their steps."""
    found = folder.iterdir() if folder.is_dir() else ()
    return {path: int(match[1]) for path in found if (match := _STEP.fullmatch(path.name))}


def _keep(folder: Path, step: int, keep: int) -> None:
    """Delete all but the newest exports; later steps belong to a continuation that was abandoned."""
    found = _steps(folder)
    kept = sorted(number for number in found.values() if number <= step)[-keep:]
    for path, number in found.items():
        if number not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _remove_incomplete(target: Path, attempt: int) -> None:
    """Delete what this attempt and earlier ones wrote of an export that they did not complete."""
    for path in target.parent.glob(f".{target.name}.tmp-*"):
        written_by = path.name.rpartition("-")[2]
        if written_by.isdecimal() and int(written_by) <= attempt:
            shutil.rmtree(path, ignore_errors=True)


def _replace(source: Path, target: Path) -> None:
    """Replace a folder by another; a rename alone cannot replace a folder that is not empty."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)
