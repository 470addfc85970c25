"""From a YAML file and `--set` options to a checked PPOJob.

The commands `validate` and `run` call it. It refuses what the API server would refuse, and what it would silently drop.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import SpecError, parse_manifest
from ppojob_trainer.commands.kubernetes_yaml import parse_all
from ppojob_trainer.commands.local_paths import with_absolute_paths
from ppojob_trainer.commands.overrides import apply_override


class ManifestError(ValueError):
    """The file is not YAML, or holds no PPOJob, or several; the message begins with the file's name."""


@dataclass(frozen=True)
class Manifest:
    """A checked PPOJob, as its file and the options say it."""

    namespace: str
    name: str
    spec: PPOJobSpec


def load(path: Path, overrides: Sequence[str] = (), *, folder: Path | None = None) -> Manifest:
    """Return the PPOJob in the file (`-`: standard input) with the `--set` options applied.

    Args:
        folder: relative paths of the spec are those below it. None: they are refused.

    Raises:
        ManifestError: the file cannot be read, is not YAML, or does not hold exactly one PPOJob.
        SpecError: the PPOJob, or an option, cannot be used; with every problem that was found.
    """
    documents = [document for document in _documents(path) if document is not None]
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == constants.KIND]
    if len(jobs) != 1:
        found = ", ".join(_shown(document) for document in documents) or "nothing"
        raise ManifestError(f"{path}: the file must contain one document of kind {constants.KIND}; it contains {found}")
    # An anchor and its aliases are one object in Python: `--set` must change only the place that it names.
    raw = json.loads(json.dumps(jobs[0], default=str))
    for override in overrides:
        apply_override(raw, override)
    if folder is not None:
        raw = with_absolute_paths(raw, folder)
    return Manifest(*parse_manifest(raw))


def problems(error: ManifestError | SpecError) -> list[str]:
    """Return one line for each problem: `path: value: message`."""
    return [str(field) for field in error.errors] if isinstance(error, SpecError) else [str(error)]


def _documents(path: Path) -> list[Any]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        return parse_all(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: it cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}: it is not YAML: {' '.join(str(error).split())}") from error


def _shown(document: object) -> str:
    if not isinstance(document, dict):
        return f"a {type(document).__name__}"
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{document.get('kind', 'an object without kind')} {name or ''}".strip()
