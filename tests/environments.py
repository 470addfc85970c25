"""Programs that a test runs in a separate environment, because their pins conflict with ours.

Called by `tests/oracles` and by tests that start a server. The requirements are pinned and complete: nothing else is
installed, not even what these packages ask for. Environments are in the user's cache, one for each content of the
requirements, and are built once; uv links most of their packages from its own cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cluster.layout import PROJECT, Layout
from tools.cluster.locks import held

BUILD_LIMIT_SECONDS = 1500
# Written last: an environment without it was cut off while it was built.
COMPLETE = "complete"


class EnvironmentFailedError(RuntimeError):
    """The environment could not be built, or its program failed."""


@dataclass(frozen=True)
class OwnEnvironment:
    """The packages of a file of requirements; `group` is the folder of the cache in which it lies."""

    group: str
    name: str
    requirements: Path

    @property
    def folder(self) -> Path:
        """Where it lies; it need not exist yet."""
        content = f"{sys.version_info[:2]}".encode() + self.requirements.read_bytes()
        key = hashlib.sha256(content).hexdigest()[:12]
        return Layout.from_environment().cache / self.group / f"{self.name}-{key}"

    def python(self) -> Path:
        """Return its Python; build it first, where that was not done.

        Raises:
            EnvironmentFailedError: with the end of the output.
        """
        folder = self.folder
        python = folder / "bin" / "python"
        with held(folder.with_suffix(".lock"), limit=BUILD_LIMIT_SECONDS):
            if (folder / COMPLETE).exists():
                return python
            shutil.rmtree(folder, ignore_errors=True)
            uv = _uv()
            run([uv, "venv", "--quiet", "--python", sys.executable, folder], BUILD_LIMIT_SECONDS)
            packages: list[str | Path] = ["--no-deps", "-r", self.requirements]
            run([uv, "pip", "install", "--quiet", "--python", python, *packages], BUILD_LIMIT_SECONDS)
            (folder / COMPLETE).touch()
        return python


def variables() -> dict[str, str]:
    """Return the environment variables of such a program: nothing of the project's reaches into it."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONWARNINGS")}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def run(command: Sequence[str | Path], limit: float) -> None:
    """Run a program to its end.

    Raises:
        EnvironmentFailedError: it failed, or took longer than `limit` seconds.
    """
    try:
        done = subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailedError(f"{Path(command[0]).name} ran longer than {limit:g} s: {command}") from error
    if done.returncode != 0:
        said = f"exit code {done.returncode} of {[str(part) for part in command]}:\n{done.stderr[-3000:]}"
        raise EnvironmentFailedError(said)


def _uv() -> str:
    found = shutil.which("uv") or shutil.which("uv", path=PROJECT / ".build" / "uv" / "bin")
    if found is None:
        raise EnvironmentFailedError("uv is neither on PATH nor in .build/uv: `make install` brings it")
    return found
