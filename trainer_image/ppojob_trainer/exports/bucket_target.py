"""Exports in an object store: the model's files, and then the key that completes them.

    s3://bucket/prefix/config.json, model.safetensors, ...     with export Final
    s3://bucket/prefix/ppojob-export.json                      uid, step and files; it is written last
    s3://bucket/prefix/step-8/...                              with export Each

It refuses a place that holds another run's export, and deletes only what an earlier export of the same run left there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppojob_trainer.checkpoints import BucketError, BucketUnreachableError, CredentialsMissingError
from ppojob_trainer.checkpoints.bucket import Bucket, connect
from ppojob_trainer.exports.errors import UploadCredentialsError, UploadFailedError, UploadRefusedError
from ppojob_trainer.exports.target import MANIFEST, Export

_FIELD = "checkpoint.exportTo"


class BucketTarget:
    """Implements `Target`."""

    def __init__(self, address: str) -> None:
        with _named_errors():
            self._root = connect(address, _FIELD)
        self._bucket = self._root
        self._manifest: dict[str, Any] = {}
        self._stale: list[str] = []

    def check(self, uid: str) -> None:
        """See `Target`."""
        with _named_errors():
            for name in self._root.sizes():
                if name == MANIFEST or name.endswith(f"/{MANIFEST}"):
                    self._refuse_foreign(self._root, name, uid)
            probe = f"probe-{uid}"
            self._root.overwrite(probe, b"")
            self._root.remove([probe])

    def begin(self, export: Export) -> bool:
        """See `Target`."""
        self._bucket = self._root.within(export.place) if export.place else self._root
        self._manifest = _manifest_of(export)
        with _named_errors():
            found = self._refuse_foreign(self._bucket, MANIFEST, export.uid)
            if found == self._manifest and self._has_all():
                return False
            self._stale = [name for name in found.get("files", ()) if name not in self._manifest["files"]]
            self._bucket.remove([MANIFEST])
        return True

    def add(self, name: str, path: Path) -> None:
        """See `Target`."""
        with _named_errors():
            self._bucket.upload(name, path)

    def finish(self) -> str:
        """See `Target`."""
        with _named_errors():
            if not self._has_all():
                raise UploadFailedError(
                    f"{_FIELD} {self._bucket.address} has other files than those that were uploaded: make sure "
                    "that only one job writes there"
                )
            self._bucket.remove(self._stale)
            self._bucket.overwrite(MANIFEST, json.dumps(self._manifest, indent=1, sort_keys=True).encode())
        return self._bucket.address

    def _has_all(self) -> bool:
        sizes = self._bucket.sizes()
        return all(sizes.get(name) == size for name, size in self._manifest["files"].items())

    def _refuse_foreign(self, bucket: Bucket, name: str, uid: str) -> dict[str, Any]:
        """Return what a manifest says; nothing if it does not exist."""
        found = bucket.read(name)
        manifest = _decode(found.content) if found is not None else {"uid": uid}
        if manifest.get("uid") != uid:
            place = f"{bucket.address}/{name}".removesuffix(f"/{MANIFEST}")
            raise UploadRefusedError(
                f"{_FIELD} {self._root.address} cannot be used: {place} holds the model of another run (uid "
                f"{manifest.get('uid', 'unknown')}, this run has {uid}); create the job with another prefix, or "
                "delete that model first"
            )
        return manifest


def _manifest_of(export: Export) -> dict[str, Any]:
    stats = {name: path.stat() for name, path in export.files().items()}
    return {
        "uid": export.uid,
        "step": export.step,
        # Distinguishes two exports of a step, which a rolled-back run makes.
        "written": max(stat.st_mtime_ns for stat in stats.values()),
        "files": {name: stat.st_size for name, stat in stats.items()},
    }


def _decode(content: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(content)
    except ValueError:
        return {}
    return manifest if isinstance(manifest, dict) else {}


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except BucketUnreachableError as error:
        raise UploadFailedError(str(error)) from error
    except CredentialsMissingError as error:
        raise UploadCredentialsError(str(error)) from error
    except BucketError as error:
        raise UploadRefusedError(str(error)) from error
