"""One version: pyproject.toml has it, and the chart, CHANGELOG.md, SECURITY.md and every image tag agree."""

import re
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from ppojob_api.v1alpha1.versions import own_version
from tests.architecture.test_words import tree
from tools.release.version import (
    IMAGES,
    Change,
    ReleaseError,
    changes_of,
    is_development,
    newest_release,
    project_version,
)

VERSION = project_version(Path("pyproject.toml").read_text())
IMAGE_TAG = re.compile(r"ppojob-(?:operator|trainer(?:-cuda)?):(\d+\.\d+\.\d+[\w.-]*)")
# What these say of a version is not a reference to an image of this one.
OTHERS = ("tests/unit/", "CHANGELOG.md")


def test_the_installed_package_has_it() -> None:
    assert Version(installed_version("ppojob")) == Version(VERSION), "call make install"
    assert own_version() == VERSION


def test_the_chart_has_it_twice() -> None:
    chart = yaml.safe_load(Path("charts/ppojob/Chart.yaml").read_text())

    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_the_changelog_has_its_changes() -> None:
    assert changes_of(VERSION, Path("CHANGELOG.md").read_text())


def test_the_next_version_is_newer_than_the_newest_release() -> None:
    """Else a message of the operator could name one version for both sides that do not work together."""
    newest = Version(newest_release(Path("CHANGELOG.md").read_text()))

    assert Version(VERSION) > newest if is_development(VERSION) else Version(VERSION) == newest


def test_it_is_a_version_of_helm_and_the_tag_of_an_image_too() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(-(dev|rc)(\.[1-9]\d*)?)?", VERSION)


def test_the_minor_version_of_the_newest_release_is_the_supported_one() -> None:
    newest = newest_release(Path("CHANGELOG.md").read_text())
    supported = re.findall(r"^\| ([\d.]+) \| yes \|$", Path("SECURITY.md").read_text(), re.MULTILINE)

    assert supported == [newest.rpartition(".")[0]]


def test_every_image_of_ours_that_is_named_has_its_tag() -> None:
    named = [
        (str(path), tag)
        for path in tree()
        if not str(path).startswith(OTHERS) and path.suffix in {".md", ".py", ".yaml", ".txt"}
        for tag in IMAGE_TAG.findall(path.read_text())
    ]

    assert len(named) > 10
    assert {(path, tag) for path, tag in named if tag != VERSION} == set()


def test_the_images_are_those_that_are_built() -> None:
    targets = set(re.findall(r"^(image-[a-z-]+)", Path("Makefile").read_text(), re.MULTILINE))
    if targets:
        assert {name.replace("ppojob-", "image-") for name in IMAGES} <= targets


CHANGELOG = """
## [Unreleased]

### Added

- Something later.

## [1.1.0] - 2026-01-02

### Added

- A thing
  over two lines.

### Fixed

- Another.

## [1.0.0] - 2026-01-01

### Added

- The start.
"""


def test_changes_are_read_by_version_and_kind() -> None:
    assert changes_of("1.1.0", CHANGELOG) == [Change("added", "A thing over two lines."), Change("fixed", "Another.")]
    assert changes_of("1.0.0", CHANGELOG) == [Change("added", "The start.")]
    assert changes_of("1.2.0-dev", CHANGELOG) == [Change("added", "Something later.")]
    assert newest_release(CHANGELOG) == "1.1.0"


@pytest.mark.parametrize(
    ("version", "changelog", "words"),
    [
        ("1.2.0", CHANGELOG, r"no changes of 1\.2\.0: add a section `## \[1\.2\.0\] - YYYY-MM-DD`"),
        ("1.1.0", CHANGELOG.replace(" - 2026-01-02", ""), r"no changes of 1\.1\.0"),
        ("Unreleased", CHANGELOG, "no changes of Unreleased"),
        ("1.1.0-dev", CHANGELOG.replace("## [Unreleased]", "## [1.1.1]"), "no changes of Unreleased"),
        ("1.0.0", CHANGELOG.replace("- The start.", ""), r"no changes of 1\.0\.0"),
        ("1.0.0", CHANGELOG.replace("Fixed", "Mended").replace("1.1.0", "1.0.0", 1), "is below 'Mended'"),
    ],
)
def test_a_version_without_changes_is_refused(version: str, changelog: str, words: str) -> None:
    with pytest.raises(ReleaseError, match=words):
        changes_of(version, changelog)
