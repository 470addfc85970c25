"""The PPOJobs of `examples/`, for every test that goes through them: some folders have more than one."""

from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.templates import parse_among
from ppojob_api.v1alpha1.validation import parse_manifest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*/*.yaml") if "\nkind: PPOJob\n" in path.read_text())


def template_of(example: Path) -> dict[str, Any] | None:
    """Return the template beside an example. None: there is none."""
    path = example.with_name("template.yaml")
    return yaml.safe_load(path.read_text()) if path.exists() else None


def spec_of(example: Path) -> PPOJobSpec:
    """Return the checked spec of an example, completed with its template."""
    template = template_of(example)
    parse = partial(parse_among, documents=[] if template is None else [template])
    return parse_manifest(yaml.safe_load(example.read_text()), parse)[2]


def name_of(example: Path) -> str:
    """Return the folder's name, and behind it the file's where that is not ppojob.yaml."""
    folder = example.parent.name
    return folder if example.stem == "ppojob" else f"{folder}-{example.stem}"
