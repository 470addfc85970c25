"""From YAML files and `--set` options to a checked PPOJob, completed with its template.

The commands `validate`, `run` and `plan` call it. It refuses what the API server would refuse, and what it would
silently drop.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.template_reference import TemplateKind
from ppojob_api.v1alpha1.templates import document_problems, parse_among
from ppojob_api.v1alpha1.validation import FieldError, SpecError, parse_manifest
from ppojob_trainer.commands.kubernetes_yaml import in_one_line, parse_all
from ppojob_trainer.commands.local_paths import with_absolute_paths
from ppojob_trainer.commands.overrides import apply_override
from ppojob_trainer.commands.own_modules import module_errors


class ManifestError(ValueError):
    """The file is not YAML, or holds no PPOJob, or several; the message begins with the file's name."""


class OnlyTemplatesError(ManifestError):
    """The file holds valid templates, and no PPOJob."""

    def __init__(self, message: str, names: Sequence[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)
        """Kind and name of each."""


@dataclass(frozen=True)
class Manifest:
    """A checked PPOJob, as its file and the options say it."""

    namespace: str
    name: str
    spec: PPOJobSpec


def load(
    path: Path, overrides: Sequence[str] = (), *, folder: Path | None = None, templates: Sequence[Path] = ()
) -> Manifest:
    """Return the PPOJob in the file (`-`: standard input) with the `--set` options applied.

    Args:
        path: the file. It may hold the job's template, too.
        overrides: the `--set` options.
        folder: relative paths of the spec are those below it. None: they are refused.
        templates: files with templates.

    Raises:
        ManifestError: a file cannot be read, is not YAML, or does not hold exactly one PPOJob, or no template.
        SpecError: the PPOJob, its template, or an option, cannot be used; with every problem that was found.
    """
    documents = _documents(path)
    known = [*_templates(documents), *(each for file in templates for each in load_templates(file))]
    jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == constants.KIND]
    if len(jobs) != 1:
        names = [_shown(document) for document in documents]
        found = ", ".join(names) or "nothing"
        message = f"{path}: the file must contain one document of kind {constants.KIND}; it contains {found}"
        is_valid = documents and len(_templates(documents)) == len(documents)
        raise OnlyTemplatesError(message, names) if is_valid else ManifestError(message)
    # An anchor and its aliases are one object in Python: `--set` must change only the place that it names.
    raw = json.loads(json.dumps(jobs[0], default=str))
    for override in overrides:
        apply_override(raw, override)
    if folder is not None:
        raw = with_absolute_paths(raw, folder)
    manifest = Manifest(*parse_manifest(raw, partial(parse_among, documents=known)))
    if errors := module_errors(manifest.spec):
        raise SpecError(errors)
    return manifest


def load_templates(path: Path) -> list[dict[str, Any]]:
    """Return the checked templates in a file.

    Raises:
        ManifestError: the file cannot be read, is not YAML, or holds something else.
        SpecError: a template cannot be used; with every problem that was found.
    """
    documents = _documents(path)
    found = _templates(documents)
    if not found or len(found) != len(documents):
        kinds = " or ".join(TemplateKind)
        shown = ", ".join(_shown(document) for document in documents) or "nothing"
        raise ManifestError(f"{path}: the file must contain documents of kind {kinds} only; it contains {shown}")
    return found


def _templates(documents: Sequence[Any]) -> list[dict[str, Any]]:
    found = [each for each in documents if isinstance(each, dict) and each.get("kind") in list(TemplateKind)]
    errors = [
        FieldError(f"{_shown(template)}: {error.path}", error.value, error.message)
        for template in found
        for error in document_problems(template)
    ]
    if errors:
        raise SpecError(errors)
    return found


def problems(error: ManifestError | SpecError) -> list[str]:
    """Return one line for each problem: `path: value: message`."""
    return [str(field) for field in error.errors] if isinstance(error, SpecError) else [str(error)]


def _documents(path: Path) -> list[Any]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        return [document for document in parse_all(text) if document is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: it cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}: it is not YAML: {in_one_line(error)}") from error


def _shown(document: object) -> str:
    if not isinstance(document, dict):
        return f"a {type(document).__name__}"
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{document.get('kind', 'an object without kind')} {name or ''}".strip()
