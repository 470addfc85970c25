"""Models and data on the Hugging Face Hub, or on the mirror that HF_ENDPOINT names, by huggingface_hub.

The token is HF_TOKEN. A branch or tag is resolved to a commit once, and every file is of that commit. A file that was
complete is kept when a fetch continues; huggingface_hub downloads an incomplete one again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from ppojob_api.v1alpha1.sources import HubAddress, Source, SourceKind
from ppojob_trainer.commands.fetch.errors import FetchError, FetchRefusedError, of_storage
from ppojob_trainer.commands.fetch.listing import Listing, RemoteFile, refuse_unsafe

_TOKEN = "give a token by HF_TOKEN in spec.env, from a Secret"
_ELSEWHERE = "set HF_ENDPOINT in spec.env to a mirror, or copy the files to the storage and give their path"
_LATER = (408, 425, 429)

disable_progress_bars()
# Its lines would repeat signed addresses.
logging.getLogger("httpx2").setLevel(logging.WARNING)


class HubPlace:
    """One address on the hub."""

    def __init__(self, source: Source, address: HubAddress) -> None:
        self._source = source
        self._address = address
        self._type = "model" if source.kind is SourceKind.MODEL else "dataset"

    def listing(self) -> Listing:
        """Return the files of the repository, or the file that the address names."""
        with self._named_errors():
            return self._one_file() if self._address.file else self._all_files()

    def _one_file(self) -> Listing:
        url = hf_hub_url(
            self._address.repository, self._address.file, repo_type=self._type, revision=self._address.revision
        )
        found = get_hf_file_metadata(url)
        if found.size is None or found.commit_hash is None:
            raise FetchError(f"{self._where}: {constants.ENDPOINT} does not send its size and commit; {_ELSEWHERE}")
        name = Path(self._source.path).name
        return Listing(found.commit_hash, (RemoteFile(name, self._address.file, found.size),))

    def _all_files(self) -> Listing:
        hub = HfApi()
        ask = hub.model_info if self._type == "model" else hub.dataset_info
        info = ask(self._address.repository, revision=self._address.revision, files_metadata=True)
        siblings = [(each.rfilename, each.size or 0) for each in info.siblings or ()]
        refuse_unsafe([name for name, _ in siblings], self._source.address)
        return Listing(info.sha, tuple(RemoteFile(name, name, size) for name, size in siblings))

    def download(self, file: RemoteFile, listing: Listing, folder: Path, check: Callable[[], None]) -> None:
        """Put a file of the listing's commit into a folder."""
        check()
        path = folder / file.name
        with self._named_errors():
            found = hf_hub_download(
                self._address.repository,
                file.remote,
                repo_type=self._type,
                revision=listing.revision,
                local_dir=folder,
            )
        if Path(found) != path:
            Path(found).replace(path)

    @property
    def _where(self) -> str:
        return f"spec.{self._source.fields[0]} {self._source.address}"

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except FetchError:
            raise
        except Exception as error:  # huggingface_hub and its client raise many types; none of them is a bug of ours
            raise self._named(error) from error

    def _named(self, error: Exception) -> FetchError:
        if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            # What huggingface_hub raises where it finds neither the file nor a copy of it.
            return self._named(error.__cause__)
        if permanent := self._refusal(error):
            return FetchRefusedError(f"{self._where}: {permanent}")
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, HfHubHTTPError):
            return of_storage(error, self._where)
        said = " ".join(str(error).split())[:500] or type(error).__name__
        return FetchError(f"{self._where}: {constants.ENDPOINT} cannot be used: {said}; if this persists, {_ELSEWHERE}")

    def _refusal(self, error: Exception) -> str:
        """Return why another try cannot help, and the remedy; empty: it may."""
        repository, revision, hub = self._address.repository, self._address.revision, constants.ENDPOINT
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        said = " ".join(str(error).split())[:500]
        # The most specific class first.
        cases = (
            (
                isinstance(error, GatedRepoError),
                f"access to {repository} is restricted ({status}): accept its licence on its page with the account of "
                f"the token, and {_TOKEN}",
            ),
            (
                isinstance(error, RepositoryNotFoundError) or status in (401, 403),
                f"there is no {self._type} {repository} at {hub}, or the token may not read it ({status}): correct the "
                f"name, accept its licence, or {_TOKEN}",
            ),
            (
                isinstance(error, RevisionNotFoundError),
                f"{repository} has no revision {revision!r}: give a branch, a tag or a commit",
            ),
            (
                isinstance(error, EntryNotFoundError),
                f"{repository} has no file {self._address.file} in revision {revision!r}: correct the address",
            ),
            (
                isinstance(error, OfflineModeIsEnabled),
                f"HF_HUB_OFFLINE is set, so the hub is not asked: remove it, or {_ELSEWHERE}",
            ),
            (
                isinstance(error, HFValidationError) or (400 <= status < 500 and status not in _LATER),
                f"{hub} refuses: {said}; correct the address",
            ),
        )
        return next((words for is_so, words in cases if is_so), "")
