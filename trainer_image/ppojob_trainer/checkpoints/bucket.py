"""The keys below an address in an object store, read and written with obstore.

No other module imports obstore or catches its errors. `bucket_store.py`, `readers.py` and `exports` call this module;
`engines` use its connection for the shards, and `commands.fetch` reads models and data with it. obstore reads the
credentials, region and endpoint from the environment. They are never logged, nor is the body of a store's answer, which
may repeat a signed request. obstore retries a call for
`RETRY_LIMIT`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from ppojob_trainer.checkpoints import address as addresses
from ppojob_trainer.checkpoints.errors import (
    BucketError,
    BucketRefusedError,
    BucketUnreachableError,
    CredentialsMissingError,
)

if TYPE_CHECKING:
    from obstore import GetOptions, UpdateVersion
    from obstore.store import ObjectStore

RETRY_LIMIT = timedelta(seconds=60)
_MAX_RETRIES = 10
_PROBE = "probe"
_PART_BYTES = 16 * 1024 * 1024
"""Size of the parts of an uploaded file. At most twelve are in memory; a file has at most 10,000."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: ([^:<\n]+)")
_USER = re.compile(r"//[^/@\s]+@")
# Where obstore asks when the environment has nothing, and what it says of a file that it was pointed to.
_CREDENTIAL_MARKS = (
    "/latest/api/token",
    "/latest/meta-data",
    "computeMetadata",
    "WebIdentity",
    "credential",
    "token request",
    "Missing AccessKeyId",
    "Missing SecretAccessKey",
)
_CREDENTIALS = (
    "give credentials by spec.env or spec.envFrom from a Secret (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
    "GOOGLE_SERVICE_ACCOUNT), or by spec.serviceAccountName if the cluster has workload identity"
)


class ChangedMeanwhileError(Exception):
    """A conditional write was refused: the key is not what the caller has seen."""


@dataclass(frozen=True)
class Found:
    """What a key held, and which version of it that was."""

    content: bytes
    version: UpdateVersion


@dataclass(frozen=True)
class Bucket:
    """The keys below an address."""

    address: str
    store: ObjectStore
    prefix: str
    field: str = "checkpoint.path"
    """Path of the field that has the address, for errors."""

    def read(self, name: str) -> Found | None:
        """Return what a key holds; None where there is none."""
        with self._named_errors():
            try:
                found = obstore.get(self.store, self._key(name))
                return Found(bytes(found.bytes()), _version(found.meta["e_tag"], found.meta["version"]))
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)
                return None

    def write(self, name: str, content: bytes, *, replaces: UpdateVersion | None) -> UpdateVersion:
        """Write a key whose version is still `replaces`, or which is not there (None); return its version.

        Raises:
            ChangedMeanwhileError: it is there, or another version of it.
        """
        with self._named_errors():
            try:
                done = obstore.put(self.store, self._key(name), content, mode=replaces or "create")
            except (AlreadyExistsError, PreconditionError) as error:
                raise ChangedMeanwhileError(f"{self.address}/{name}") from error
        return _version(done["e_tag"], done["version"])

    def overwrite(self, name: str, content: bytes) -> None:
        """Write a key, whatever was there."""
        with self._named_errors():
            obstore.put(self.store, self._key(name), content)

    def sizes(self, name: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all keys below a name, by their names below it."""
        key = self._key(name)
        start = len(key) + 1 if key else 0
        with self._named_errors():
            pages = obstore.list(self.store, prefix=key or None)
            return {found["path"][start:]: found["size"] for page in pages for found in page}

    def version(self, name: str = "") -> tuple[int, str] | None:
        """Return size in bytes and version of a key, or of the address itself; None where there is none."""
        with self._named_errors():
            try:
                found = obstore.head(self.store, self._key(name))
                return found["size"], found["e_tag"] or ""
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)
                return None

    def stream(self, name: str, *, offset: int, e_tag: str) -> Iterator[bytes]:
        """Yield what a key holds from an offset on.

        Raises:
            ChangedMeanwhileError: it is another version.
        """
        options: GetOptions = {"range": {"offset": offset}}
        if e_tag:
            options["if_match"] = e_tag
        with self._named_errors():
            try:
                yield from map(bytes, obstore.get(self.store, self._key(name), options=options).stream())
            except PreconditionError as error:
                raise ChangedMeanwhileError(f"{self.address}/{name}".rstrip("/")) from error

    def delete(self, name: str, *, first: str | None = None) -> None:
        """Delete all keys below a name, one of them before the others. Keys that are gone already are no error."""
        keys = [f"{name}/{found}" for found in self.sizes(name)]
        leading = [key for key in keys if key == f"{name}/{first}"]
        for group in (leading, [key for key in keys if key not in leading]):
            self.remove(group)

    def remove(self, names: list[str]) -> None:
        """Delete single keys. Keys that are gone already are no error."""
        with self._named_errors():
            try:
                obstore.delete(self.store, [self._key(name) for name in names])
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)

    def check(self, name: str) -> None:
        """Try the operations that checkpoints need: conditional writes and deletion of keys.

        Raises:
            BucketError: one of them failed; its class shows whether a retry may help.
        """
        probe = f"{_PROBE}-{name}"
        self.overwrite(probe, b"")
        for condition, version in (("If-None-Match", None), ("If-Match", _version("none", "1"))):
            try:
                self.write(probe, b"", replaces=version)
            except ChangedMeanwhileError:
                continue
            raise BucketRefusedError(
                f"{self.field} {self.address} cannot be used: the object store does not honour {condition} when it "
                "writes, so two attempts could overwrite each other's checkpoints; use another store, or a newer "
                "version of this one"
            )
        self.remove([probe])

    def upload(self, name: str, file: Path) -> None:
        """Write a file of this machine to a key, whatever was there; a large one in parts."""
        with self._named_errors():
            obstore.put(self.store, self._key(name), file, chunk_size=_PART_BYTES)

    def within(self, name: str) -> Bucket:
        """Return the keys below a name."""
        return replace(self, address=addresses.below(self.address, name), prefix=self._key(name))

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self.prefix, name) if part)

    def _named_errors(self) -> AbstractContextManager[None]:
        return _named_errors(self.field, self.address)

    def _refuse_missing_bucket(self, error: FileNotFoundError) -> None:
        if "NoSuchBucket" in str(error):
            raise _named(self.field, self.address, error) from error


def connect(address: str, field: str = "checkpoint.path") -> Bucket:
    """Return the keys below an address of the spec. Nothing is asked of the store yet.

    Raises:
        BucketError: the environment's settings for it cannot be used.
    """
    bucket, prefix = addresses.split(address)
    with _named_errors(field, address):
        store = from_url(bucket, retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": RETRY_LIMIT})
    return Bucket(address.rstrip("/"), store, prefix, field)


def said(error: BaseException) -> str:
    """Return the message for an obstore error: its first line without users, and the code of the answer's body."""
    text = str(error).strip() or type(error).__name__
    line = _USER.sub("//", text.splitlines()[0].partition("<?xml")[0].partition("<Error")[0]).rstrip(": ")
    code = _CODE.search(text)
    return f"{line[:300]} ({code[1]})" if code else line[:300]


@contextmanager
def _named_errors(field: str, address: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, BaseError, ValueError) as error:
        raise _named(field, address, error) from error


def _named(field: str, address: str, error: Exception) -> BucketError:
    text = str(error)
    what = f"{field} {address} cannot be used"
    # Models and data are only read.
    rights = "list, read, write and delete" if field.startswith("checkpoint.") else "list and read"
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text:
        return BucketRefusedError(
            f"{what}: there is no such bucket ({said(error)}); create it, or correct the path (and AWS_REGION or "
            "AWS_ENDPOINT_URL, if it is elsewhere)"
        )
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return BucketRefusedError(
            f"{what}: the store refuses ({said(error)}); the credentials must be allowed to {rights} there; "
            f"{_CREDENTIALS}"
        )
    if any(mark in text for mark in _CREDENTIAL_MARKS):
        return CredentialsMissingError(f"{what}: there are no credentials ({said(error)}); {_CREDENTIALS}")
    status = _STATUS.search(text)
    return BucketUnreachableError(
        f"{what}: {said(error)}{'' if status else f', tried for up to {RETRY_LIMIT.seconds} s'}; check the store, "
        "the network to it, and AWS_ENDPOINT_URL (http:// needs AWS_ALLOW_HTTP=true)"
    )


def _version(e_tag: str | None, version: str | None) -> UpdateVersion:
    found: UpdateVersion = {}
    if e_tag is not None:
        found["e_tag"] = e_tag
    if version is not None:
        found["version"] = version
    return found
