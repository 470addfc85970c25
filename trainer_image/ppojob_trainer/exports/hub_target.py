"""Exports in a model repository of the HuggingFace hub, by huggingface_hub: one commit for each export.

    hf://organisation/name             the newest export is the head of `main`
    hf://organisation/name@step-8      with export Each: a tag

The repository is created as a private one if it does not exist. Large files are uploaded one by one before the commit,
so readers see a complete export or the one before. `HF_TOKEN` is the token, `HF_ENDPOINT` another hub's address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils.tqdm import disable_progress_bars

from ppojob_trainer.exports.errors import (
    UploadCredentialsError,
    UploadError,
    UploadFailedError,
    UploadRefusedError,
)
from ppojob_trainer.exports.target import Export

SCHEME = "hf://"
_KEPT = ".gitattributes"
"""The hub's own file of a new repository."""
_QUERY = re.compile(r"\?\S+")
_TRANSIENT = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_TOKEN = (
    "give a token that may write there as HF_TOKEN, by spec.env or spec.envFrom from a Secret (and HF_ENDPOINT for "
    "another hub)"
)


class HubTarget:
    """Implements `Target`."""

    def __init__(self, address: str) -> None:
        # They would fill the log.
        disable_progress_bars()
        self._address = address
        self._repository = address.removeprefix(SCHEME)
        self._token = os.environ.get("HF_TOKEN", "")
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=self._token or False)
        self._export: Export | None = None
        self._additions: dict[str, CommitOperationAdd] = {}
        self._commit = ""

    def check(self, uid: str) -> None:
        """See `Target`. A repository keeps its history, so another run's model is not lost and not refused."""
        with self._named_errors():
            self._refuse_unusable_settings()
            account = self._api.whoami()
            try:
                self._api.auth_check(self._repository, write=True)
            except HfHubHTTPError as error:
                # The hub hides repositories that the token may not see.
                if error.response.status_code not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND):
                    raise
            else:
                return
        owner = self._repository.partition("/")[0]
        names = [account.get("name"), *(each.get("name") for each in account.get("orgs", ()))]
        role = account.get("auth", {}).get("accessToken", {}).get("role")
        if owner not in names:
            raise self._refused(f"the token's account {names[0]} does not belong to {owner}", _TOKEN)
        if role == "read":
            raise self._refused("the token may only read", _TOKEN)

    def begin(self, export: Export) -> bool:
        """See `Target`. The hub itself recognizes files that it has."""
        with self._named_errors():
            self._refuse_unusable_settings()
            self._api.create_repo(self._repository, private=True, exist_ok=True)
        self._export, self._commit = export, ""
        self._additions = {
            name: CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in export.files().items()
        }
        return True

    def add(self, name: str, path: Path) -> None:
        """See `Target`."""
        with self._named_errors():
            # The content stays in the operation, because small files travel with the commit.
            self._api.preupload_lfs_files(self._repository, [self._additions[name]], free_memory=False)

    def finish(self) -> str:
        """See `Target`."""
        assert self._export is not None, "begin() comes first"
        with self._named_errors():
            # Called again if the tag could not be set.
            self._commit = self._commit or self._committed(f"Policy after step {self._export.step}")
            if not self._export.place:
                return self._address
            self._tag(self._export.place, self._commit)
        return f"{self._address}@{self._export.place}"

    def _committed(self, message: str) -> str:
        """Commit the files that were added, and the deletion of all others; return the commit's name."""
        there = self._api.list_repo_files(self._repository)
        stale = [name for name in there if name not in self._additions and name != _KEPT]
        operations: list[CommitOperationAdd | CommitOperationDelete] = list(self._additions.values())
        operations += [CommitOperationDelete(name) for name in stale]
        return str(self._api.create_commit(self._repository, operations, commit_message=message).oid)

    def _tag(self, tag: str, commit: str) -> None:
        """Set a tag; a run that was rolled back exports a step again, and moves it."""
        try:
            self._api.delete_tag(self._repository, tag=tag)
        except HfHubHTTPError as error:
            if error.response.status_code != HTTPStatus.NOT_FOUND:
                raise
        self._api.create_tag(self._repository, tag=tag, revision=commit)

    def _refuse_unusable_settings(self) -> None:
        if constants.HF_HUB_OFFLINE:
            raise self._refused("HF_HUB_OFFLINE is set", "remove it from spec.env")
        if not self._token:
            raise UploadCredentialsError(f"{self._cannot} there is no token; {_TOKEN}")

    @property
    def _cannot(self) -> str:
        return f"checkpoint.exportTo {self._address} cannot be used:"

    def _refused(self, cause: str, remedy: str) -> UploadRefusedError:
        return UploadRefusedError(f"{self._cannot} {cause}; {remedy}")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except UploadError:
            raise
        except Exception as error:
            # The library lets the errors of its HTTP client and of its storage through.
            raise self._named(error) from error

    def _named(self, error: BaseException) -> UploadError:
        """Return the error with a remedy, without addresses that a store has signed."""
        answered = next((link for link in _chain(error) if isinstance(link, HfHubHTTPError)), None)
        if answered is not None:
            status = answered.response.status_code
            said = (
                f"the hub answers {status} ({_first_line(answered.server_message or answered.response.reason_phrase)})"
            )
            if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                return self._refused(said, _TOKEN)
            if status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _TRANSIENT:
                return self._refused(said, "correct the name of the repository, or what the hub names")
            return UploadFailedError(f"{self._cannot} {said}; check the hub and the network to it")
        if isinstance(error, ValueError):
            return self._refused(_first_line(str(error)), "correct what the hub names")
        root = list(_chain(error))[-1]
        said = f"{type(root).__name__}: {_first_line(str(root))}"
        return UploadFailedError(f"{self._cannot} {said}; check the hub, the network to it, and HF_ENDPOINT")


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _first_line(text: str) -> str:
    return _QUERY.sub("", " ".join(text.split()))[:300]
