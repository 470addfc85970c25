"""The checkpoints of one run in an object store; see `store.py` for what they promise.

    s3://bucket/prefix/tracker.json               who may write here (uid, attempt), and which checkpoint is the newest
    s3://bucket/prefix/step-8.attempt-0/...       a complete checkpoint: it has manifest.json, which is written last
    s3://bucket/prefix/step-12.attempt-1/...      without a manifest: attempt 1 is writing it

Nothing is renamed, because a store would copy every byte. So each attempt uses separate names, and a checkpoint is
valid once it has its manifest. Owner and tracker are one key. It is written only on the condition that it still has the
content that this attempt wrote last. A newer attempt changes it when it claims the address, so an old attempt can never
move the tracker, however late its write arrives. (A folder has no conditional write, so the owner is checked before and
after.)
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ppojob_api.v1alpha1.training import ResumePolicy
from ppojob_trainer.checkpoints.bucket import ChangedMeanwhileError, connect
from ppojob_trainer.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    IncompleteCheckpointError,
    manifest_of,
    parse_manifest,
)
from ppojob_trainer.checkpoints.errors import (
    UNKNOWN_OWNER,
    BucketError,
    BucketUnreachableError,
    CheckpointUnreadableError,
    FencedOutError,
    ForeignCheckpointError,
    ForeignFilesError,
)
from ppojob_trainer.checkpoints.readers import BucketReader, newest_complete, order_of, read, read_at

if TYPE_CHECKING:
    from obstore import UpdateVersion

__all__ = ["BucketStore", "last_attempt"]

_log = logging.getLogger(__name__)
_TRACKER = "tracker.json"
_CLAIMS = 5


@dataclass(frozen=True)
class _Tracker:
    """tracker.json."""

    uid: str
    attempt: int
    claim: str
    """Identifies one process, to recognize its own write if the answer was lost, and a second driver of the attempt."""
    newest: str | None = None
    """Name of the newest checkpoint; None while there is none."""
    resumed_from: str | None = None
    """The value of `checkpoint.resumeFrom`, once the run resumed from it; later attempts use their own checkpoints."""


class BucketStore:
    """Writes, finds and deletes the checkpoints of one attempt. Implements `store.CheckpointStore`."""

    def __init__(self, address: str, *, uid: str, attempt: int) -> None:
        """See `connect` for what it raises."""
        self._bucket = connect(address)
        self._reader = BucketReader(self._bucket)
        self._tracker = _Tracker(uid, attempt, uuid.uuid4().hex)
        self._version: UpdateVersion | None = None

    def claim(self, *, adopts: bool = False, adopted_uid: str | None = None) -> None:
        """See `CheckpointStore`; it also finds out whether the object store can be used."""
        self._bucket.check(f"{self._tracker.attempt}-{self._tracker.claim}")
        for _ in range(_CLAIMS):
            known = self._read()
            found, version = known or (None, None)
            if found is not None and found.uid == self._tracker.uid:
                self._refuse_newer(found)
                self._tracker = replace(self._tracker, newest=found.newest, resumed_from=found.resumed_from)
            elif self._reader.names() and not adopts and _uid_of(found) != adopted_uid:
                raise self._foreign(found)
            try:
                self._version = self._bucket.write(_TRACKER, _encode(self._tracker), replaces=version)
            except ChangedMeanwhileError:
                continue
            return
        raise BucketUnreachableError(
            f"checkpoint.path {self._bucket.address} cannot be used: {_TRACKER} was changed by somebody else {_CLAIMS} "
            "times while this attempt claimed it; make sure that only one job writes there"
        )

    def resume_point(self, policy: ResumePolicy, resume_from: str | None) -> Checkpoint | None:
        """See `CheckpointStore`."""
        known = self._tracker.resumed_from
        if resume_from is not None and (policy is ResumePolicy.NEVER or known != resume_from):
            return self._begin_from(resume_from)
        return None if policy is ResumePolicy.NEVER else self.latest()

    def latest(self) -> Checkpoint | None:
        """See `CheckpointStore`."""
        newest = self._tracker.newest
        if newest is None:
            # A kill between the first manifest and the tracker.
            newest = next(reversed(self._reader.names()), None)
        return read(self._reader, newest) if newest is not None else None

    def older_than(self, step: int) -> Checkpoint | None:
        """See `CheckpointStore`."""
        return newest_complete(self._reader, before=step)

    def begin(self, step: int) -> str:
        """See `CheckpointStore`."""
        self._check_fence()
        name = self._name(step)
        complete, incomplete = self._reader.complete_and_incomplete()
        for left in incomplete:
            # Files of a higher attempt belong to one that has claimed the address just now.
            if order_of(left)[1] <= self._tracker.attempt:
                self._bucket.delete(left)
        if name in complete:
            self._vacate(name, step)
        return self._reader.location(name)

    def abandon(self, step: int) -> None:
        """See `CheckpointStore`."""
        try:
            self._bucket.delete(self._name(step), first=MANIFEST)
        except BucketError as error:
            # The original error is raised on; the remaining files have no manifest, and the next attempt deletes them.
            _log.warning("the incomplete checkpoint of step %d could not be deleted: %s", step, error)

    def commit(self, step: int, *, state: Mapping[str, Any], keep: int) -> Checkpoint:
        """See `CheckpointStore`."""
        name = self._name(step)
        manifest = manifest_of(step=step, uid=self._tracker.uid, state=state, files=self._bucket.sizes(name))
        self._check_fence()
        self._bucket.overwrite(f"{name}/{MANIFEST}", json.dumps(manifest, indent=1, sort_keys=True).encode())
        self._track(replace(self._tracker, newest=name))
        self._keep(keep, step)
        return read(self._reader, name)

    def _begin_from(self, location: str) -> Checkpoint:
        found = read_at(location)
        own = {self._reader.location(name): name for name in self._reader.names()}
        # Written to the store with the next checkpoint, or now if the run is rolled back.
        self._tracker = replace(self._tracker, resumed_from=location)
        if found.location in own:
            self._track(replace(self._tracker, newest=own[found.location]))
        return found

    def _keep(self, keep: int, step: int) -> None:
        own = [name for name in self._reader.names() if self._is_own(name)]
        # If several attempts saved a step, the last counts; later steps belong to an abandoned continuation of the run.
        newest = {order_of(name)[0]: name for name in own if order_of(name)[0] <= step}
        kept = [newest[known] for known in sorted(newest)][-keep:]
        for name in own:
            if name not in kept:
                self._bucket.delete(name, first=MANIFEST)

    def _vacate(self, name: str, step: int) -> None:
        """Make room for a step that the same attempt writes again; the tracker must not name what is being deleted."""
        if not self._is_own(name):
            raise ForeignCheckpointError(self._reader.location(name))
        if self._tracker.newest == name:
            older = self.older_than(step)
            self._track(replace(self._tracker, newest=older.location.rpartition("/")[2] if older else None))
        self._bucket.delete(name, first=MANIFEST)

    def _is_own(self, name: str) -> bool:
        found = self._bucket.read(f"{name}/{MANIFEST}")
        try:
            return found is not None and parse_manifest(found.content)["uid"] == self._tracker.uid
        except IncompleteCheckpointError:
            return False

    def _check_fence(self) -> None:
        found, _ = self._read() or (None, None)
        if found is None or found.claim != self._tracker.claim:
            raise self._refusal(found)

    def _track(self, tracker: _Tracker) -> None:
        try:
            self._version = self._bucket.write(_TRACKER, _encode(tracker), replaces=self._version)
        except ChangedMeanwhileError as error:
            found, version = self._read() or (None, None)
            if found != tracker:
                raise self._refusal(found) from error
            # Our own write, whose answer was lost.
            self._version = version
        self._tracker = tracker

    def _refuse_newer(self, found: _Tracker) -> None:
        if found.attempt > self._tracker.attempt:
            raise self._refusal(found)

    def _refusal(self, found: _Tracker | None) -> FencedOutError | ForeignFilesError:
        if found is None or found.uid != self._tracker.uid:
            return self._foreign(found)
        return FencedOutError(self._bucket.address, attempt=self._tracker.attempt, newer=found.attempt)

    def _foreign(self, found: _Tracker | None) -> ForeignFilesError:
        return ForeignFilesError(self._bucket.address, uid=self._tracker.uid, owner=_uid_of(found))

    def _read(self) -> tuple[_Tracker, UpdateVersion] | None:
        found = self._bucket.read(_TRACKER)
        if found is None:
            return None
        try:
            return _decode(found.content), found.version
        except ValueError as error:
            location, newest = f"{self._bucket.address}/{_TRACKER}", newest_complete(self._reader)
            raise CheckpointUnreadableError.of(location, str(error), older=newest) from error

    def _name(self, step: int) -> str:
        return f"step-{step}.attempt-{self._tracker.attempt}"


def last_attempt(address: str) -> int | None:
    """Return the number of the last attempt that claimed the address; None if there is none or it cannot be read."""
    found = connect(address).read(_TRACKER)
    try:
        return _decode(found.content).attempt if found is not None else None
    except ValueError:
        # `claim` names the broken key.
        return None


def _encode(tracker: _Tracker) -> bytes:
    return json.dumps(asdict(tracker), indent=1, sort_keys=True).encode()


def _decode(content: bytes) -> _Tracker:
    try:
        return _Tracker(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise ValueError("it was not written by this program") from error


def _uid_of(found: _Tracker | None) -> str:
    return UNKNOWN_OWNER if found is None else found.uid
