"""Which program builds images here (docker, podman or buildah), and its command lines. Pure but for `find`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.images.errors import ImageError

PROGRAMS = ("docker", "podman", "buildah")
ANSWER_LIMIT_SECONDS = 60
Command = list[str]


@dataclass(frozen=True)
class Engine:
    """`command` calls the program, with its options; `program` says whose options it takes."""

    command: tuple[str, ...]
    program: str

    def build(
        self,
        *,
        containerfile: str,
        context: str,
        tag: str,
        arguments: Mapping[str, str],
        labels: Mapping[str, str],
        options: Sequence[str] = (),
    ) -> Command:
        """Build a Containerfile. The layers are kept for the next build, which buildah alone must be asked for."""
        return [
            *(*self.command, "build"),
            *(["--layers"] if self.program == "buildah" else []),
            *options,
            *(f"--build-arg={name}={value}" for name, value in arguments.items()),
            *(f"--label={name}={value}" for name, value in labels.items()),
            *(f"--file={containerfile}", f"--tag={tag}", context),
        ]

    def tag(self, name: str, other: str) -> Command:
        """Give an image another name."""
        return [*self.command, "tag", name, other]

    def push(self, name: str, options: Sequence[str] = ()) -> Command:
        """Push an image to the registry that its name begins with."""
        return [*self.command, "push", *options, name]

    def inspect(self, name: str) -> Command:
        """Print what the store knows of an image; fails if it has none of that name."""
        return [*self.command, "inspect", "--type=image", name]

    def remove(self, name: str) -> Command:
        """Forget an image."""
        return [*self.command, "rmi", name]

    def script(self, image: str, user: str, program: Sequence[str]) -> str:
        """Return a shell script that runs a program as `user` in a new container, which goes when it ends."""
        if self.program != "buildah":
            first, *rest = program
            options = ["--rm", "--interactive", f"--user={user}", f"--entrypoint={first}"]
            return shlex.join([*self.command, "run", *options, image, *rest])
        run = shlex.join([*self.command, "run", f"--user={user}"])
        return "; ".join(
            [
                f"container=$({shlex.join([*self.command, 'from', '--pull=false', image])}) || exit",
                f"""trap '{shlex.join([*self.command, "rm"])} "$container" >/dev/null' EXIT""",
                f'{run} "$container" -- {shlex.join(program)}',
            ]
        )


def find(environment: Mapping[str, str] = os.environ) -> Engine:
    """Return the engine that ENGINE names, else the first one that is installed and answers.

    The docker command may be there without its daemon, so each is asked.

    Raises:
        ImageError: none works, with what each said.
    """
    if named := environment.get("ENGINE", ""):
        return parse(named)
    silent = []
    for program in PROGRAMS:
        if shutil.which(program, path=environment.get("PATH")) is None:
            silent.append(f"{program}: not on PATH")
            continue
        if not (said := _complaint(program, environment)):
            return Engine((program,), program)
        silent.append(f"{program}: {said}")
    raise ImageError(
        "no program here can build images ("
        + "; ".join(silent)
        + "). Start docker's daemon, or install podman or buildah; ENGINE=... names another command"
    )


def parse(words: str) -> Engine:
    """Return the engine of a command such as `podman`, `sudo docker` or `buildah --root FOLDER`.

    Raises:
        ImageError: it calls none of the three.
    """
    command = tuple(shlex.split(words))
    for word in command:
        if (program := Path(word).name) in PROGRAMS:
            return Engine(command, program)
    raise ImageError(f"ENGINE={words!r} calls none of {', '.join(PROGRAMS)}: name one of them, with its options if any")


def _complaint(program: str, environment: Mapping[str, str]) -> str:
    """Return why the program does not work here, "" if it does."""
    try:
        done = subprocess.run(
            [program, "info"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_LIMIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return "" if done.returncode == 0 else (said[-1] if said else f"exit code {done.returncode}")
