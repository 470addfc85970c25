"""Addresses of models and data, and the folders in the storage that they are fetched into. Pure.

    hf://organisation/name[@revision]                     a model, or a data set, depending on the field
    hf://datasets/organisation/name[@revision]/path/file  one file of a data set (as huggingface_hub writes it)
    s3://bucket/prefix, gs://bucket/prefix                a folder, or one file, depending on the field

`path_rules.py` refuses other forms. The operator and `ppojob run` call `localized`: job.json then has folders of the
storage in place of addresses, and beside them the list of what `ppojob_trainer.commands.fetch` fetches. The folder is a
function of the address alone, so jobs that share a storage share what was fetched.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.spec import PPOJobSpec

SOURCES_FOLDER = "sources"
"""Folder below the mount path: what was fetched is in it."""

_NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
_REVISION = "(@[A-Za-z0-9][A-Za-z0-9._%-]*)?"
_PART = "/[^/.][^/]*"
_IN_BUCKET = f"(s3|gs)://{_NAME}({_PART})+"
_DEFAULT_REVISION = "main"
_ROLES = ("actor", "critic", "ref", "reward")
_SETS = ("train", "validation")


class SourceKind(StrEnum):
    """What an address stands for; the field says it."""

    MODEL = "Model"
    DATA_SET = "DataSet"
    DATA_FILE = "DataFile"


PATTERNS = {
    SourceKind.MODEL: f"^(/.*|hf://{_NAME}/{_NAME}{_REVISION}|{_IN_BUCKET})$",
    SourceKind.DATA_SET: f"^(/.*|hf://{_NAME}/{_NAME}{_REVISION}|{_IN_BUCKET})$",
    SourceKind.DATA_FILE: f"^(/.*|hf://datasets/{_NAME}/{_NAME}{_REVISION}({_PART})+|{_IN_BUCKET})$",
}
"""Absolute paths and addresses, as a regular expression of Python and of RE2."""

_BARE_NAME = re.compile(f"{_NAME}/{_NAME}{_REVISION}")
_PAGE = re.compile(f"https?://[^/]+/(?:datasets/)?({_NAME}/{_NAME})(?:/.*)?")
_FOLDERS = {SourceKind.MODEL: "models", SourceKind.DATA_SET: "datasets", SourceKind.DATA_FILE: "files"}
_HASH_LENGTH = 12


class HubAddress(NamedTuple):
    """The parts of an `hf://` address."""

    repository: str
    """organisation/name."""
    revision: str
    """Branch, tag or commit."""
    file: str
    """File in the repository; empty: all of it."""


class Source(ApiModel):
    """Something that is fetched into the storage before the pods with GPUs exist."""

    address: str
    """Where it comes from."""
    kind: SourceKind
    """What it is."""
    with_code: bool = False
    """Whether the Python files beside a model are fetched too: trustRemoteCode."""
    folder: str
    """Folder in the storage that appears when all of it is there."""
    path: str
    """What the trainer reads: the folder, or the file in it."""
    fields: list[str]
    """Fields of the spec that name it."""


def is_address(path: str) -> bool:
    """Return whether a value is an address of some scheme, and no path."""
    return "://" in path


def is_repository_name(path: str) -> bool:
    """Return whether a value is the bare name of a repository on the hub: organisation/name."""
    return _BARE_NAME.fullmatch(path) is not None


def hub_address(address: str) -> HubAddress | None:
    """Return the parts of a valid `hf://` address; None: it is in a bucket."""
    scheme, _, rest = address.partition("://")
    if scheme != "hf":
        return None
    parts = rest.split("/")
    if len(parts) > 2:
        # Only files have more than two parts, and `datasets` stands before them.
        parts = parts[1:]
    name, _, revision = parts[1].partition("@")
    return HubAddress(f"{parts[0]}/{name}", unquote(revision) or _DEFAULT_REVISION, "/".join(parts[2:]))


def problem(path: str, kind: SourceKind, example: str) -> str:
    """Return what is wrong with a path or an address, and the remedy; empty: nothing.

    Args:
        path: as the spec has it.
        kind: what the field names.
        example: an absolute path that would be right.
    """
    if re.fullmatch(PATTERNS[kind], path):
        return ""
    if kind is not SourceKind.DATA_FILE and is_repository_name(path):
        return f"is not an absolute path; if it is a repository of the Hugging Face Hub, write hf://{path}"
    if page := _PAGE.fullmatch(path):
        name = f"hf://datasets/{page[1]}/path/of/the/file" if kind is SourceKind.DATA_FILE else f"hf://{page[1]}"
        return f"the address of a page cannot be fetched: write {name}"
    if is_address(path) and path.endswith("/"):
        return "remove the slash at its end"
    return f"must be an absolute path such as {example}, or {_FORMS[kind]}"


_BUCKETS = "s3://bucket/prefix or gs://bucket/prefix"
_FORMS = {
    SourceKind.MODEL: f"hf://organisation/name[@revision], {_BUCKETS}",
    SourceKind.DATA_SET: f"hf://organisation/name[@revision], {_BUCKETS}",
    SourceKind.DATA_FILE: "hf://datasets/organisation/name[@revision]/path/file, s3://bucket/key or gs://bucket/key",
}
RULE_WORDS = {kind: f"must be an absolute path, or an address: {forms}" for kind, forms in _FORMS.items()}
"""What the API server says, whose rules cannot name a value."""


def localized(spec: PPOJobSpec, storage: str) -> tuple[PPOJobSpec, list[Source]]:
    """Return the spec with the storage's folders in place of its addresses, and what is to be fetched, each once.

    Args:
        spec: whose addresses are valid.
        storage: where the trainer sees the storage.
    """
    if not has_addresses(spec):
        return spec, []
    wire = spec.to_wire()
    found: dict[str, Source] = {}
    for holder, name, field, kind in _holders(wire):
        given = holder[name]
        if not is_address(given):
            continue
        with_code = kind is SourceKind.MODEL and holder.get("trustRemoteCode", False)
        place = _source(given, kind, storage, with_code=with_code)
        known = found.setdefault(place.path, place)
        known.fields.append(field)
        holder[name] = place.path
    return PPOJobSpec.model_validate(wire), list(found.values())


def with_addresses(spec: PPOJobSpec, sources: Iterable[Source]) -> PPOJobSpec:
    """Return a spec of `localized` with its addresses again in place of the folders."""
    given = {field: source.address for source in sources for field in source.fields}
    if not given:
        return spec
    wire = spec.to_wire()
    for holder, name, field, _ in _holders(wire):
        holder[name] = given.get(field, holder[name])
    return PPOJobSpec.model_validate(wire)


def has_addresses(spec: PPOJobSpec) -> bool:
    """Return whether anything is to be fetched. The operator asks at each reconcile, so nothing is copied here."""
    models = (getattr(spec.model, role) for role in _ROLES)
    paths = [model.path or "" for model in models if model is not None]
    for _, source in spec.data.sources():
        paths += source.files.paths if source.files else []
        paths += [source.hugging_face.path] if source.hugging_face else []
    return any(map(is_address, paths))


def addresses(spec: PPOJobSpec) -> Iterator[tuple[str, str, SourceKind]]:
    """Yield field, value and kind of everything that may be an address."""
    for holder, name, field, kind in _holders(spec.to_wire()):
        yield field, holder[name], kind


def _holders(wire: dict[str, Any]) -> Iterator[tuple[Any, Any, str, SourceKind]]:
    """Yield what holds each path, the key there, its field below `spec`, and its kind."""
    for role in _ROLES:
        model = wire["model"].get(role, {})
        if "path" in model:
            yield model, "path", f"model.{role}.path", SourceKind.MODEL
    for field, source in _sets_of_prompts(wire["data"]):
        if "huggingFace" in source:
            yield source["huggingFace"], "path", f"{field}.huggingFace.path", SourceKind.DATA_SET
        paths = source.get("files", {}).get("paths", [])
        for index in range(len(paths)):
            yield paths, index, f"{field}.files.paths[{index}]", SourceKind.DATA_FILE


def _sets_of_prompts(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield on the wire what `DataSpec.sources` yields."""
    mixture = data["train"].get("mixture", [])
    yield from ((f"data.train.mixture[{index}]", source) for index, source in enumerate(mixture))
    yield from ((f"data.{name}", data[name]) for name in _SETS if name in data)


def _source(address: str, kind: SourceKind, storage: str, *, with_code: bool) -> Source:
    folder = _folder(PurePosixPath(storage) / SOURCES_FOLDER, address, kind, with_code=with_code)
    path = folder / address.rpartition("/")[2] if kind is SourceKind.DATA_FILE else folder
    return Source(address=address, kind=kind, with_code=with_code, folder=str(folder), path=str(path), fields=[])


def _folder(root: PurePosixPath, address: str, kind: SourceKind, *, with_code: bool) -> PurePosixPath:
    """Return the folder of an address. No folder lies in another, so that each can appear by a rename."""
    scheme, _, rest = address.partition("://")
    variant = "-with-code" if with_code else ""
    hub = hub_address(address)
    if hub is None:
        bucket, _, key = rest.partition("/")
        return root / scheme / bucket / f"{_short(key)}-{_digest(f'{kind}/{with_code}/{key}')}"
    # As in the address: a revision such as refs%2Fpr%2F1 is one name.
    revision = rest.partition("@")[2].partition("/")[0] or _DEFAULT_REVISION
    repository = root / scheme / f"{_FOLDERS[kind]}{variant}" / hub.repository / revision
    return repository / f"{_short(hub.file)}-{_digest(hub.file)}" if hub.file else repository


def _short(key: str) -> str:
    """Return the last part of a key, for people; the digest distinguishes keys."""
    return re.sub("[^A-Za-z0-9._-]", "_", key.rpartition("/")[2])[:64]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
