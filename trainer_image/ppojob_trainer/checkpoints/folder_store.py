"""The checkpoints of one run in a folder; see `store.py` for their guarantees.

    checkpoints/owner.json            uid and attempt: who may write here (the fence)
    checkpoints/tracker.json          which checkpoint is the newest; replaced last
    checkpoints/step-8/               a complete checkpoint, with manifest.json
    checkpoints/.step-12.tmp-1/       attempt 1 is writing it
    checkpoints/.step-4.gone/         being deleted

A folder gets its final name when all of it is on disk, and is renamed before it is deleted.
"""

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.checkpoints import durable
from ppojob_trainer.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    IncompleteCheckpointError,
    manifest_of,
    parse_manifest,
)
from ppojob_trainer.checkpoints.errors import (
    UNKNOWN_OWNER,
    CheckpointUnreadableError,
    FencedOutError,
    ForeignFilesError,
)
from ppojob_trainer.checkpoints.readers import FolderReader, file_sizes, newest_complete, order_of, read, read_at

_log = logging.getLogger(__name__)
_LEFTOVER = re.compile(r"\.step-\d+\.(tmp-\d+|gone)|\.(tracker|owner)\.json\.\d+\.tmp")


@dataclass(frozen=True)
class _Tracker:
    """tracker.json."""

    step: int | None = None
    """The newest checkpoint; None while it is being replaced."""
    resumed_from: str | None = None
    """The folder of `checkpoint.resumeFrom`, once the run resumed from it; later attempts use their own checkpoints."""


class FolderStore:
    """Writes, finds and deletes the checkpoints of one attempt. Implements `store.CheckpointStore`."""

    def __init__(self, folder: Path, *, uid: str, attempt: int) -> None:
        self._folder = folder
        self._reader = FolderReader(folder)
        self._uid = uid
        self._attempt = attempt
        self._resumed_from: str | None = None

    def claim(self, *, adopts: bool = False, adopted_uid: str | None = None) -> None:
        """See `CheckpointStore`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        owner = self._owner()
        if owner and owner["uid"] == self._uid:
            self._refuse_newer(owner)
        elif self._steps() and not adopts and (owner["uid"] if owner else UNKNOWN_OWNER) != adopted_uid:
            raise self._foreign(owner)
        durable.write_json(self._folder / "owner.json", {"uid": self._uid, "attempt": self._attempt})

    def resume_point(self, policy: ResumePolicy, resume_from: str | None) -> Checkpoint | None:
        """See `CheckpointStore`."""
        tracker = self._tracker()
        is_new = resume_from is not None and (policy is ResumePolicy.NEVER or tracker.resumed_from != resume_from)
        if resume_from is not None and is_new:
            return self._begin_from(resume_from, tracker)
        self._resumed_from = tracker.resumed_from
        return None if policy is ResumePolicy.NEVER else self.latest()

    def latest(self) -> Checkpoint | None:
        """See `CheckpointStore`."""
        tracker = self._tracker()
        if tracker.step is not None:
            return read(self._reader, self._final(tracker.step).name)
        # A kill between a folder's rename and the tracker: the folder is complete, or it would not have its name.
        names = self._reader.names()
        return read(self._reader, names[-1]) if names else None

    def older_than(self, step: int) -> Checkpoint | None:
        """See `CheckpointStore`."""
        return newest_complete(self._reader, before=step)

    def begin(self, step: int) -> str:
        """See `CheckpointStore`."""
        self._check_fence()
        for path in self._folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        aside = self._aside(step)
        aside.mkdir()
        return str(aside)

    def abandon(self, step: int) -> None:
        """See `CheckpointStore`."""
        shutil.rmtree(self._aside(step), ignore_errors=True)

    def commit(self, step: int, *, state: Mapping[str, Any], keep: int) -> Checkpoint:
        """See `CheckpointStore`."""
        aside = self._aside(step)
        manifest = manifest_of(step=step, uid=self._uid, state=state, files=file_sizes(aside))
        durable.write_json(aside / MANIFEST, manifest)
        durable.sync_tree(aside)
        self._check_fence()
        self._vacate(step)
        aside.rename(self._final(step))
        durable.sync(self._folder)
        self._check_fence()
        self._track(_Tracker(step, self._resumed_from))
        own = [known for known in self._steps() if self._is_own(known)]
        # Later steps belong to an abandoned continuation of the run.
        kept = [known for known in own if known <= step][-keep:]
        for known in own:
            if known not in kept:
                self._delete(known)
        return read(self._reader, self._final(step).name)

    def _begin_from(self, location: str, tracker: _Tracker) -> Checkpoint:
        found = read_at(location)
        self._resumed_from = location
        if Path(location).resolve() == self._final(found.step).resolve():
            self._track(replace(tracker, step=found.step, resumed_from=location))
        return found

    def _vacate(self, step: int) -> None:
        """Make room for a step that is written again; the tracker must not name a folder that is being deleted."""
        if not self._final(step).exists():
            return
        tracker, older = self._tracker(), self.older_than(step)
        if tracker.step == step:
            self._track(replace(tracker, step=older.step if older else None))
        if self._is_own(step):
            self._delete(step)
        else:
            aside = self._folder / f"step-{step}.set-aside-{self._attempt}"
            _log.warning("%s is not a checkpoint of this run: it is now %s", self._final(step), aside)
            self._final(step).rename(aside)

    def _delete(self, step: int) -> None:
        """Delete a checkpoint; it is renamed first, so that a kill leaves no incomplete one under its name."""
        gone = self._folder / f".step-{step}.gone"
        shutil.rmtree(gone, ignore_errors=True)
        self._final(step).rename(gone)
        shutil.rmtree(gone)

    def _is_own(self, step: int) -> bool:
        try:
            found = parse_manifest((self._final(step) / MANIFEST).read_text())
        except (OSError, IncompleteCheckpointError):
            return False
        return (found["uid"], found["step"]) == (self._uid, step)

    def _check_fence(self) -> None:
        owner = self._owner()
        if owner is None or owner["uid"] != self._uid:
            raise self._foreign(owner)
        self._refuse_newer(owner)

    def _refuse_newer(self, owner: Mapping[str, Any]) -> None:
        if owner["attempt"] > self._attempt:
            raise FencedOutError(str(self._folder), attempt=self._attempt, newer=owner["attempt"])

    def _foreign(self, owner: Mapping[str, Any] | None) -> ForeignFilesError:
        """Return the error; without an owner, there is no owner.json."""
        return ForeignFilesError(str(self._folder), uid=self._uid, owner=owner["uid"] if owner else UNKNOWN_OWNER)

    def _owner(self) -> dict[str, Any] | None:
        path = self._folder / "owner.json"
        try:
            owner = durable.read_json(path)
        except ValueError as error:
            raise CheckpointUnreadableError.of(str(path), "it is not a JSON object", older=None) from error
        if owner is not None and not {"uid", "attempt"} <= set(owner):
            raise CheckpointUnreadableError.of(str(path), "it lacks uid or attempt", older=None)
        return owner

    def _tracker(self) -> _Tracker:
        path = self._folder / "tracker.json"
        try:
            raw = durable.read_json(path)
            if raw is None or raw["uid"] != self._uid:
                return _Tracker()
            return _Tracker(raw["step"], raw["resumedFrom"])
        except (ValueError, KeyError) as error:
            newest = newest_complete(self._reader)
            raise CheckpointUnreadableError.of(str(path), "it was not written by this program", older=newest) from error

    def _track(self, tracker: _Tracker) -> None:
        content = {"step": tracker.step, "resumedFrom": tracker.resumed_from}
        durable.write_json(self._folder / "tracker.json", {**content, "uid": self._uid, "attempt": self._attempt})

    def _aside(self, step: int) -> Path:
        return self._folder / f".step-{step}.tmp-{self._attempt}"

    def _final(self, step: int) -> Path:
        return self._folder / f"step-{step}"

    def _steps(self) -> list[int]:
        return [order_of(name)[0] for name in self._reader.names()]


def last_attempt(folder: Path) -> int | None:
    """Return the number of the last attempt that claimed the folder; None if there is none or it cannot be read."""
    try:
        owner = durable.read_json(folder / "owner.json") or {}
    except ValueError:
        # `claim` names the broken file.
        return None
    return owner.get("attempt")
