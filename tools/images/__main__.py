"""The command line: `python3 -m tools.images build|push|check [IMAGE ...]`. The Makefile calls it.

The environment says how: ENGINE, TAG, REGISTRY, BASE, UV_DEFAULT_INDEX, PIP_INDEX_URL, BUILD_OPTIONS, PUSH_OPTIONS.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tools.images import recipes
from tools.images.engine import Command, Engine, find
from tools.images.errors import ImageError
from tools.images.recipes import PROJECT, RECIPES, Recipe

INSIDE = Path(__file__).with_name("inside.py")
# A cluster that chooses the user id takes one that the image does not know, with group 0. Small enough for podman
# without root, which has 65,536 of them.
CHOSEN_USER = "23456:0"
# Pure Python, small, and in none of the images.
ADDED_PACKAGE = "cowsay"
_BUILD_REMEDY = (
    "The output above has the reason. If the base image or a package cannot be downloaded, set BASE, UV_DEFAULT_INDEX "
    "or PIP_INDEX_URL: docs/install.md, section Images"
)
_UPON = "FROM {image}\nRUN pip install --quiet {package}\nRUN python -c 'import {package}'\n"


def build(engine: Engine, recipe: Recipe, environment: Mapping[str, str]) -> str:
    """Build an image of the working tree; return its name.

    Raises:
        ImageError: the program fails; with the variables that help if it could not download something.
    """
    name = f"{recipe.repository}:{recipes.tag(environment)}"
    command = engine.build(
        containerfile=str(PROJECT / recipe.containerfile),
        context=str(PROJECT),
        tag=name,
        arguments={**dict(recipe.arguments), **recipes.mirrors(environment)},
        labels=recipes.labels(recipe),
        options=shlex.split(environment.get("BUILD_OPTIONS", "")),
    )
    start = time.monotonic()
    try:
        run(command)
    except ImageError as error:
        raise ImageError(f"{error}\n{_BUILD_REMEDY}") from error
    say(f"built {name} with {engine.program} in {time.monotonic() - start:.0f} s")
    return name


def push(engine: Engine, recipe: Recipe, environment: Mapping[str, str]) -> str:
    """Tag an image that was built for the registry and push it; return its name there.

    Raises:
        ImageError: REGISTRY is empty, or the image is not built.
    """
    registry = environment.get("REGISTRY", "").rstrip("/")
    if not registry:
        raise ImageError("REGISTRY says where to push to, and is empty: REGISTRY=registry.example/team make push")
    local = require_built(engine, recipe, environment)
    name = f"{registry}/{local}"
    run(engine.tag(local, name))
    run(engine.push(name, shlex.split(environment.get("PUSH_OPTIONS", ""))))
    say(f"pushed {name}")
    return name


def check(engine: Engine, recipe: Recipe, environment: Mapping[str, str]) -> str:
    """Import in the image all that its program imports, as its user and as one that a cluster chose.

    A trainer's image is also built upon, with a package that pip adds.
    """
    name = require_built(engine, recipe, environment)
    python = ["python", "-", recipe.kind]
    own = "65532" if recipe.kind == "operator" else "1000"
    for user in (own, CHOSEN_USER):
        say(f"{name} as user {user}")
        run(["sh", "-c", engine.script(name, user, python)], stdin=INSIDE)
    if recipe.kind != "operator":
        say(f"an image made from {name}, with {ADDED_PACKAGE}")
        _build_upon(engine, name, environment)
    return name


def _build_upon(engine: Engine, name: str, environment: Mapping[str, str]) -> None:
    added = f"{name}-with-{ADDED_PACKAGE}"
    with tempfile.TemporaryDirectory(prefix="ppojob-image-") as folder:
        containerfile = Path(folder) / "Containerfile"
        containerfile.write_text(_UPON.format(image=name, package=ADDED_PACKAGE))
        run(
            engine.build(
                containerfile=str(containerfile),
                context=folder,
                tag=added,
                arguments={},
                labels={},
                options=shlex.split(environment.get("BUILD_OPTIONS", "")),
            )
        )
    run(engine.remove(added))


def require_built(engine: Engine, recipe: Recipe, environment: Mapping[str, str]) -> str:
    """Return the image's name.

    Raises:
        ImageError: the engine's store does not have it.
    """
    name = f"{recipe.repository}:{recipes.tag(environment)}"
    done = subprocess.run(engine.inspect(name), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        target = next(target for target, each in RECIPES.items() if each is recipe)
        raise ImageError(f"{engine.program} has no image {name}: build it first, with `make image-{target}`")
    return name


def run(command: Command, stdin: Path | None = None) -> None:
    """Run a command whose output the user sees.

    Raises:
        ImageError: it cannot be started, or fails.
    """
    try:
        with (stdin or Path(os.devnull)).open() as file:
            done = subprocess.run(command, cwd=PROJECT, stdin=file, check=False)
    except OSError as error:
        raise ImageError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode:
        raise ImageError(f"exit code {done.returncode}: {shlex.join(command)}")


def say(words: str) -> None:
    """Print a line at once, between the lines of the engine."""
    print(words, flush=True)


ACTIONS = {"build": build, "push": push, "check": check}


def main(arguments: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Do one action with the images that are named; return the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m tools.images", description=__doc__)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"{', '.join(RECIPES)}; all if none is named")
    given = parser.parse_args(arguments)
    try:
        chosen = recipes.choose(given.images)
        engine = find(environment)
        for recipe in chosen:
            ACTIONS[given.action](engine, recipe, environment)
    except ImageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
