"""The checkpoints of one run. The controller alone calls it; the ranks write their shards where `begin` says.

    checkpoints/owner.json            uid and attempt: who may write here (the fence)
    checkpoints/tracker.json          which checkpoint is the newest; replaced last
    checkpoints/step-8/               a whole checkpoint, with manifest.json
    checkpoints/.step-12.tmp-1/       attempt 1 is writing it
    checkpoints/.step-4.gone/         being deleted

A kill at any moment leaves the newest whole checkpoint readable: a folder gets its name when the disk has all of it,
the tracker names it after that, and what is older goes last. It opens no tensor, and deletes only folders whose
manifest says that this run wrote them.
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
from ppojob_trainer.checkpoints.checkpoint import BrokenFolderError, Checkpoint, read, read_manifest, seal
from ppojob_trainer.checkpoints.errors import CheckpointUnreadableError, FencedOutError, ForeignFilesError

_log = logging.getLogger(__name__)
_FINAL = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"\.step-\d+\.(tmp-\d+|gone)|\.(tracker|owner)\.json\.\d+\.tmp")


@dataclass(frozen=True)
class _Tracker:
    """tracker.json."""

    step: int | None = None
    """The newest checkpoint; None while it is being replaced."""
    resumed_from: str | None = None
    """The folder of `checkpoint.resumeFrom`, once the run went on from it; later attempts go on from their own."""


class CheckpointStore:
    """Writes, finds and tidies the checkpoints of one attempt."""

    def __init__(self, folder: Path, *, uid: str, attempt: int) -> None:
        self._folder = folder
        self._uid = uid
        self._attempt = attempt
        self._resumed_from: str | None = None

    def claim(self) -> None:
        """Write this attempt into owner.json; call it before anything is loaded.

        Raises:
            FencedOutError: a newer attempt of the same job is there.
            ForeignFilesError: another job's checkpoints are there.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        owner = self._owner()
        if owner and owner["uid"] == self._uid:
            self._refuse_newer(owner)
        elif self._steps():
            raise ForeignFilesError(self._folder, uid=self._uid, owner=owner["uid"] if owner else "unknown")
        durable.write_json(self._folder / "owner.json", {"uid": self._uid, "attempt": self._attempt})

    def resume_point(self, policy: ResumePolicy, resume_from: str | None) -> Checkpoint | None:
        """Return the checkpoint to go on from; None begins afresh.

        `resume_from` counts once: an attempt that finds checkpoints written after it goes on from those. If it is one
        of this run's own, the run is wound back to it.

        Raises:
            CheckpointUnreadableError: the checkpoint is not whole; the message names it and the older one.
        """
        tracker = self._tracker()
        is_new = resume_from is not None and (policy is ResumePolicy.NEVER or tracker.resumed_from != resume_from)
        if resume_from is not None and is_new:
            return self._begin_from(Path(resume_from), tracker)
        self._resumed_from = tracker.resumed_from
        return None if policy is ResumePolicy.NEVER else self.latest()

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint.

        Raises:
            CheckpointUnreadableError: it is not whole.
        """
        tracker = self._tracker()
        if tracker.step is not None:
            return self._read(self._final(tracker.step))
        # A kill between a folder's rename and the tracker: the folder is whole, or it would not have its name.
        steps = self._steps()
        return self._read(self._final(steps[-1])) if steps else None

    def older_than(self, step: int) -> Checkpoint | None:
        """Return the newest whole checkpoint before `step`."""
        return _newest_whole(self._folder, [known for known in self._steps() if known < step])

    def begin(self, step: int) -> Path:
        """Return an empty folder for the shards of `step`; what earlier attempts left half done is removed.

        Raises:
            FencedOutError: a newer attempt owns the folder.
        """
        self._check_fence()
        for path in self._folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        aside = self._aside(step)
        aside.mkdir()
        return aside

    def abandon(self, step: int) -> None:
        """Remove the folder that `begin` gave."""
        shutil.rmtree(self._aside(step), ignore_errors=True)

    def commit(self, step: int, *, state: Mapping[str, Any], keep: int) -> Checkpoint:
        """Make the folder of `begin` the newest checkpoint, then delete all but the newest `keep`.

        `state` is JSON, and comes back in `Checkpoint.state`. Retries of the same step replace it.

        Raises:
            FencedOutError: a newer attempt owns the folder; the tracker was not touched.
        """
        seal(self._aside(step), step=step, uid=self._uid, state=state)
        self._check_fence()
        self._vacate(step)
        self._aside(step).rename(self._final(step))
        durable.sync(self._folder)
        self._check_fence()
        self._track(_Tracker(step, self._resumed_from))
        own = [known for known in self._steps() if self._is_own(known)]
        # Steps after this one belong to a course of the run that was given up.
        kept = [known for known in own if known <= step][-keep:]
        for known in own:
            if known not in kept:
                self._delete(known)
        return read(self._final(step))

    def _begin_from(self, folder: Path, tracker: _Tracker) -> Checkpoint:
        found = self._read(folder)
        self._resumed_from = str(folder)
        if folder.resolve() == self._final(found.step).resolve():
            self._track(replace(tracker, step=found.step, resumed_from=str(folder)))
        return found

    def _read(self, folder: Path) -> Checkpoint:
        try:
            return read(folder)
        except BrokenFolderError as error:
            name = _FINAL.fullmatch(folder.name)
            before = [step for step in _steps_in(folder.parent) if name and step < int(name[1])]
            older = _newest_whole(folder.parent, before)
            raise CheckpointUnreadableError.of(folder, str(error), older=older) from error

    def _vacate(self, step: int) -> None:
        """Make room for a step that is written again; the tracker must not name a folder that is going away."""
        if not self._final(step).exists():
            return
        tracker, older = self._tracker(), self.older_than(step)
        if tracker.step == step:
            self._track(replace(tracker, step=older.step if older else None))
        if self._is_own(step):
            self._delete(step)
        else:
            aside = self._folder / f"step-{step}.set-aside-{self._attempt}"
            _log.warning("%s is no checkpoint of this run: it is now %s", self._final(step), aside)
            self._final(step).rename(aside)

    def _delete(self, step: int) -> None:
        """Delete a checkpoint; it loses its name first, so that a kill leaves no half one under it."""
        gone = self._folder / f".step-{step}.gone"
        shutil.rmtree(gone, ignore_errors=True)
        self._final(step).rename(gone)
        shutil.rmtree(gone)

    def _is_own(self, step: int) -> bool:
        try:
            found = read_manifest(self._final(step))
        except BrokenFolderError:
            return False
        return (found["uid"], found["step"]) == (self._uid, step)

    def _check_fence(self) -> None:
        owner = self._owner()
        if owner is None or owner["uid"] != self._uid:
            found = owner["uid"] if owner else "unknown: owner.json is gone"
            raise ForeignFilesError(self._folder, uid=self._uid, owner=found)
        self._refuse_newer(owner)

    def _refuse_newer(self, owner: Mapping[str, Any]) -> None:
        if owner["attempt"] > self._attempt:
            raise FencedOutError(self._folder, attempt=self._attempt, newer=owner["attempt"])

    def _owner(self) -> dict[str, Any] | None:
        path = self._folder / "owner.json"
        try:
            owner = durable.read_json(path)
        except ValueError as error:
            raise CheckpointUnreadableError.of(path, "it is no JSON object", older=None) from error
        if owner is not None and not {"uid", "attempt"} <= set(owner):
            raise CheckpointUnreadableError.of(path, "it lacks uid or attempt", older=None)
        return owner

    def _tracker(self) -> _Tracker:
        path = self._folder / "tracker.json"
        try:
            raw = durable.read_json(path)
            if raw is None or raw["uid"] != self._uid:
                return _Tracker()
            return _Tracker(raw["step"], raw["resumedFrom"])
        except (ValueError, KeyError) as error:
            newest = _newest_whole(self._folder, self._steps())
            raise CheckpointUnreadableError.of(path, "it is not what this program writes", older=newest) from error

    def _track(self, tracker: _Tracker) -> None:
        content = {"step": tracker.step, "resumedFrom": tracker.resumed_from}
        durable.write_json(self._folder / "tracker.json", {**content, "uid": self._uid, "attempt": self._attempt})

    def _aside(self, step: int) -> Path:
        return self._folder / f".step-{step}.tmp-{self._attempt}"

    def _final(self, step: int) -> Path:
        return self._folder / f"step-{step}"

    def _steps(self) -> list[int]:
        return _steps_in(self._folder)


def last_attempt(folder: Path) -> int | None:
    """Return the number of the last attempt that claimed the folder; None where nobody did, or none can be read."""
    try:
        owner = durable.read_json(folder / "owner.json") or {}
    except ValueError:
        # `claim` names the broken file.
        return None
    return owner.get("attempt")


def _steps_in(folder: Path) -> list[int]:
    names = (_FINAL.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(name[1]) for name in names if name)


def _newest_whole(folder: Path, steps: list[int]) -> Checkpoint | None:
    for step in reversed(steps):
        try:
            return read(folder / f"step-{step}")
        except BrokenFolderError as error:
            _log.warning("%s is not whole either: %s", folder / f"step-{step}", error)
    return None
