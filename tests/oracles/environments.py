"""A peer's published functions, called in an environment of its own: its pins clash with ours.

Called by the tests of this folder. An oracle is two files here: `<name>-requirements.txt`, pinned and complete (nothing
else is installed, not even what these packages ask for), and `<name>_oracle.py`, which reads inputs from one file and
writes answers to another. Environments lie in the user's cache, one for each content of the requirements, and are
built once; most of their packages are the ones that the project has, so uv links them from its own cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.cluster.layout import PROJECT, Layout
from tests.cluster.locks import held

HERE = Path(__file__).resolve().parent
BUILD_LIMIT_SECONDS = 1500
ANSWER_LIMIT_SECONDS = 600
# Written last: an environment without it was cut off while it was built.
COMPLETE = "complete"


class OracleError(RuntimeError):
    """The environment could not be built, or the oracle's own script failed."""


@dataclass(frozen=True)
class Oracle:
    """A peer: `verl` or `trl`."""

    name: str

    @property
    def requirements(self) -> Path:
        """Its pinned packages."""
        return HERE / f"{self.name}-requirements.txt"

    @property
    def environment(self) -> Path:
        """The folder of its environment, which need not exist yet."""
        content = f"{sys.version_info[:2]}".encode() + self.requirements.read_bytes()
        key = hashlib.sha256(content).hexdigest()[:12]
        return Layout.from_environment().cache / "oracles" / f"{self.name}-{key}"

    def answers(self, inputs: Mapping[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
        """Give the inputs to the oracle's script; return what it answers.

        Raises:
            OracleError: with the end of its output.
        """
        python = self._build()
        given, answered = folder / "inputs.npz", folder / "answers.npz"
        np.savez(given, **inputs)
        _run([python, HERE / f"{self.name}_oracle.py", given, answered], ANSWER_LIMIT_SECONDS)
        with np.load(answered) as found:
            return dict(found)

    def _build(self) -> Path:
        folder = self.environment
        python = folder / "bin" / "python"
        with held(folder.with_suffix(".lock"), limit=BUILD_LIMIT_SECONDS):
            if (folder / COMPLETE).exists():
                return python
            shutil.rmtree(folder, ignore_errors=True)
            uv = _uv()
            _run([uv, "venv", "--quiet", "--python", sys.executable, folder], BUILD_LIMIT_SECONDS)
            install: list[str | Path] = [
                uv,
                "pip",
                "install",
                "--quiet",
                "--python",
                python,
                "--no-deps",
                "-r",
                self.requirements,
            ]
            _run(install, BUILD_LIMIT_SECONDS)
            (folder / COMPLETE).touch()
        return python


def _uv() -> str:
    found = shutil.which("uv") or shutil.which("uv", path=PROJECT / ".build" / "uv" / "bin")
    if found is None:
        raise OracleError("uv is neither on PATH nor in .build/uv: `make install` brings it")
    return found


def _run(command: Sequence[str | Path], limit: float) -> None:
    # Neither the project nor the settings of the tests may reach into the other environment.
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONWARNINGS")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        raise OracleError(f"{Path(command[0]).name} ran longer than {limit:g} s: {command}") from error
    if done.returncode != 0:
        raise OracleError(f"exit code {done.returncode} of {[str(part) for part in command]}:\n{done.stderr[-3000:]}")
