"""The version of package, chart and images, and what CHANGELOG.md says of it."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
IMAGES = ("ppojob-operator", "ppojob-trainer", "ppojob-trainer-cuda")
"""Names of the images: the operator's, the trainer's for CPUs, and the trainer's for NVIDIA GPUs."""
UNRELEASED = "Unreleased"
"""The heading in CHANGELOG.md of what follows the newest release."""

_VERSION_HEADING = re.compile(r"^## \[(?P<version>[^]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?$")
_KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


class ReleaseError(Exception):
    """The release cannot be made; the message says what to do."""


@dataclass(frozen=True)
class Change:
    """One entry of CHANGELOG.md."""

    kind: str
    """Its heading in lower case, as Artifact Hub writes it: added, changed, deprecated, removed, fixed or security."""
    description: str


def project_version(pyproject: str) -> str:
    """Return the one version of the project, from the text of pyproject.toml."""
    return str(tomllib.loads(pyproject)["project"]["version"])


def is_development(version: str) -> bool:
    """Return whether a version comes before a release: 0.3.0-dev. Python's metadata has 0.3.0.dev0 for it."""
    return "-" in version


def newest_release(changelog: str) -> str:
    """Return the version of the first section with a date."""
    headings = map(_VERSION_HEADING.match, changelog.splitlines())
    return next(heading["version"] for heading in headings if heading and heading["date"])


def changes_of(version: str, changelog: str) -> list[Change]:
    """Return the entries of a version, in their order: for a version of development, those of Unreleased.

    Raises:
        ReleaseError: the version has no section with a date, or an entry is below no heading of Keep a Changelog.
    """
    found: list[Change] = []
    is_dated = not is_development(version)
    version = version if is_dated else UNRELEASED
    section, kind, has_section = "", "", False
    for line in changelog.splitlines():
        if heading := _VERSION_HEADING.match(line):
            section, kind = heading["version"], ""
            has_section |= section == version and bool(heading["date"]) is is_dated
        elif section == version and line.startswith("### "):
            kind = line.removeprefix("### ")
        elif section == version and line.startswith("- "):
            if kind not in _KINDS:
                raise ReleaseError(f"CHANGELOG.md: {line!r} is below {kind!r}: use one of {', '.join(_KINDS)}")
            found.append(Change(kind.lower(), line.removeprefix("- ")))
        elif found and section == version and line.startswith("  "):
            found[-1] = Change(found[-1].kind, f"{found[-1].description} {line.strip()}")
    if not has_section or not found:
        wanted = f"## [{version}]" + (" - YYYY-MM-DD" if is_dated else "")
        raise ReleaseError(f"CHANGELOG.md has no changes of {version}: add a section `{wanted}`")
    return found
