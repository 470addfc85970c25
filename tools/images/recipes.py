"""The three images: what each is built from, its name, and the labels that say what it is. Called by `__main__`.

Labels follow the OCI image specification. `created` is the commit's time and not the build's, so that building a commit
again gives the same labels; an image of changed files says so in `revision` and has no `created`.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.images.errors import ImageError

PROJECT = Path(__file__).resolve().parents[2]
GIT_LIMIT_SECONDS = 60
_LABEL = "org.opencontainers.image"
_SECURE = re.compile(
    r"^(?:https://(?:[^/@]*@)?|ssh://(?:[^/@]*@)?|git@)(?P<host>[^/:]+)(?::\d+)?[:/](?P<path>.+?)(?:\.git)?/?$"
)


@dataclass(frozen=True)
class Recipe:
    """One image. `kind` is what `inside.py` checks."""

    repository: str
    containerfile: str
    title: str
    kind: str
    arguments: tuple[tuple[str, str], ...] = ()


RECIPES = {
    "operator": Recipe(
        repository="ppojob-operator",
        containerfile="operator/Containerfile",
        title="The operator of PPOJob",
        kind="operator",
    ),
    "trainer": Recipe(
        repository="ppojob-trainer",
        containerfile="trainer_image/Containerfile",
        title="The trainer of PPOJob, for CPU",
        kind="trainer",
        arguments=(("REQUIREMENTS", "requirements/trainer-cpu.txt"),),
    ),
    "trainer-cuda": Recipe(
        repository="ppojob-trainer-cuda",
        containerfile="trainer_image/Containerfile",
        title="The trainer of PPOJob, for NVIDIA GPUs",
        kind="trainer-cuda",
        arguments=(("REQUIREMENTS", "requirements/trainer.txt"),),
    ),
}


def choose(names: list[str]) -> list[Recipe]:
    """Return the recipes of these names, of all three if none is named.

    Raises:
        ImageError: there is no such image.
    """
    for name in names:
        if name not in RECIPES:
            raise ImageError(f"no image is called {name!r}; there are: {', '.join(RECIPES)}")
    return [RECIPES[name] for name in names or RECIPES]


def tag(environment: Mapping[str, str]) -> str:
    """Return TAG, else the project's version."""
    return environment.get("TAG") or str(_project()["version"])


def mirrors(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the build arguments for another base and another package index.

    pip brings uv, so both read the index: where one of the two variables is missing, the other one's value serves.
    """
    index = environment.get("UV_DEFAULT_INDEX") or environment.get("PIP_INDEX_URL")
    given = {
        "BASE": environment.get("BASE"),
        "UV_DEFAULT_INDEX": index,
        "PIP_INDEX_URL": environment.get("PIP_INDEX_URL") or index,
    }
    return {name: value for name, value in given.items() if value}


def labels(recipe: Recipe, project: Path = PROJECT) -> dict[str, str]:
    """Return the labels of an image that is built now; those that git knows are left out where there is no git."""
    settings = _project(project)
    found = {
        "title": recipe.title,
        "description": str(settings["description"]),
        "version": str(settings["version"]),
        "licenses": str(settings["license"]),
        "source": public_address(_git(project, "remote", "get-url", "origin")),
    }
    if revision := _git(project, "rev-parse", "HEAD"):
        is_changed = bool(_git(project, "status", "--porcelain", "--untracked-files=no"))
        found["revision"] = f"{revision}-changed" if is_changed else revision
        found["created"] = "" if is_changed else _git(project, "show", "--no-patch", "--format=%cI", "HEAD")
    return {f"{_LABEL}.{name}": value for name, value in found.items() if value}


def public_address(remote: str) -> str:
    """Return the https address of a git remote, without credentials; "" if the remote is a path of a machine."""
    match = _SECURE.match(remote)
    return f"https://{match['host']}/{match['path']}" if match else ""


def _project(project: Path = PROJECT) -> dict[str, object]:
    settings: dict[str, object] = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    return settings


def _git(project: Path, *arguments: str) -> str:
    """Return what git says, "" if it fails: a source archive has no repository."""
    command = ["git", "-C", str(project), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_LIMIT_SECONDS, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
