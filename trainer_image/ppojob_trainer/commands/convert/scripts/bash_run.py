"""Has bash itself evaluate a launch script, and returns the calls of programs that it would have started.

Bash runs in an empty folder, with a small environment, a time limit, and a PATH on which only harmless tools are real:
every other program is a recorder of its arguments. bwrap, or else unshare, keeps the script from the network and makes
the file system read-only. Called by `read`; nothing here knows verl.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

from ppojob_trainer.commands.manifest import ManifestError

LIMIT_SECONDS = 30.0
_HERE = Path(__file__).parent
_RECORDED = (
    "python python3 uv uvx pip pip3 torchrun accelerate deepspeed ray nsys ncu mpirun sbatch srun scontrol conda "
    "mamba huggingface-cli hf modelscope wandb git wget curl ssh scp rsync docker podman kubectl nvidia-smi sudo apt "
    "apt-get yum make kill pkill killall sleep"
)
_READERS = (
    "awk base64 basename bash bc cat comm cut date diff dirname env expr false find grep head hostname id jq mktemp "
    "nl nohup nproc od paste printf pwd readlink realpath rev sed seq sh shuf sort stat stdbuf tac tail test timeout "
    "tr true uname uniq wc which whoami xargs"
)
_WRITERS = "chmod cp ln mkdir mv rm tee touch"
_COMPLAINT = re.compile(r"(?P<file>[^\n:]+): line (?P<line>\d+): (?P<words>.*)")


class Sandbox(StrEnum):
    """What keeps the script from the machine."""

    BWRAP = "bwrap"
    UNSHARE = "unshare"
    NONE = "none"


@dataclass(frozen=True)
class Call:
    """A program that the script would have started."""

    words: Sequence[str]
    at: str
    """FILE:LINE."""
    is_piped: bool
    """Something in the script reads its output: here there was none."""


@dataclass(frozen=True)
class Recording:
    """What the script did."""

    calls: Sequence[Call]
    complaints: Sequence[tuple[str, str]]
    """FILE:LINE and message of each error that bash reported, in order."""
    exit_code: int
    folder: str
    """The empty folder in which it ran; arguments may begin with it."""
    home: str
    """What $HOME was."""
    last_words: str = ""
    """The last line that it printed, without what `set -x` prints."""


@dataclass(frozen=True)
class Script:
    """A script, and what it is called with."""

    path: Path
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    shown_as: str = ""
    """How messages name it, where its path says nothing."""

    @property
    def name(self) -> str:
        """How messages name it."""
        return self.shown_as or str(self.path)


def evaluate(script: Script, sandbox: Sandbox, limit: float = LIMIT_SECONDS) -> Recording:
    """Run the script to its end, with every program but harmless tools replaced by a recorder.

    Args:
        limit: seconds, after which all of its processes are ended.

    Raises:
        ManifestError: it did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="ppojob-convert-", ignore_cleanup_errors=True) as made:
        work = Path(made).resolve()
        for name in ("folder", "home", "programs", "tmp"):
            (work / name).mkdir()
        _write_programs(work, sandbox)
        # The folder is another one, so bash gets the whole path, and says it; messages have it as it was given.
        path = str(script.path.resolve())
        command = [shutil.which("bash") or "bash", path, *script.arguments]
        environment = {**_environment(work), **script.environment}
        code, printed = _run(_wrapped(work, command, environment, sandbox), work / "printed", limit, script.name)
        printed = printed.replace(path, script.name)
        record = work / "calls"
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        found = map(json.loads, lines)
        calls = [Call(call["words"], call["at"].replace(path, script.name), call["is_piped"]) for call in found]
        said = [line for line in printed.splitlines() if line.strip() and not line.startswith("+")]
        folders = (str(work / "folder"), str(work / "home"))
        return Recording(calls, _complaints(said), code, *folders, "".join(said[-1:]))


@cache
def best_sandbox() -> Sandbox:
    """Return the best sandbox that works on this machine, by trying; a container often forbids both."""
    for sandbox in (Sandbox.BWRAP, Sandbox.UNSHARE):
        if shutil.which(sandbox) is not None and _works(sandbox):
            return sandbox
    return Sandbox.NONE


def _works(sandbox: Sandbox) -> bool:
    with tempfile.TemporaryDirectory(prefix="ppojob-convert-") as made:
        work = Path(made).resolve()
        (work / "folder").mkdir()
        command = _wrapped(work, ["/bin/sh", "-c", "true"], {}, sandbox)
        try:
            done = subprocess.run(command, capture_output=True, timeout=LIMIT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def _wrapped(work: Path, command: Sequence[str], environment: Mapping[str, str], sandbox: Sandbox) -> list[str]:
    settings = {
        "work": str(work),
        "folder": str(work / "folder"),
        "command": list(command),
        "environment": dict(environment),
        "closes": sandbox is Sandbox.UNSHARE,
    }
    inside = [sys.executable, "-IS", str(_HERE / "inside.py"), json.dumps(settings)]
    if sandbox is Sandbox.BWRAP:
        views = ["--ro-bind", "/", "/", "--dev", "/dev", "--tmpfs", "/run", "--bind", str(work), str(work)]
        return ["bwrap", "--unshare-all", "--cap-drop", "ALL", "--die-with-parent", "--new-session", *views, *inside]
    if sandbox is Sandbox.UNSHARE:
        spaces = ["--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork"]
        return ["unshare", *spaces, "--kill-child", *inside]
    return inside


def _run(command: Sequence[str], printed: Path, limit: float, script: str) -> tuple[int, str]:
    """Run to the end; return the exit code and what was printed."""
    with printed.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired as error:
            raise ManifestError(
                f"{script}: it did not end within {limit:g} s, and probably waits for something that it does not get: "
                "set it with --env, allow more time with --limit, or convert the settings alone: "
                "ppojob convert -- NAME=VALUE ..."
            ) from error
        finally:
            # Also what a script without a sandbox left in the background.
            _end_group(process)
    return code, printed.read_text(encoding="utf-8", errors="replace")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    process.wait()


def _write_programs(work: Path, sandbox: Sandbox) -> None:
    """Fill the one folder on PATH: links to real tools, and recorders for the rest."""
    is_safe = sandbox is not Sandbox.NONE
    real = f"{_READERS} {_WRITERS if is_safe else ''}"
    for name in real.split():
        found = shutil.which(name)
        if found is not None:
            (work / "programs" / name).symlink_to(found)
    start = [sys.executable, "-IS", str(_HERE / "recorder.py"), str(work / "calls")]
    recorded = f"{_RECORDED} {'' if is_safe else _WRITERS}"
    for name in recorded.split():
        _write_program(work / "programs" / name, [*start, name])
    _write_program(work / "programs" / "PPOJOB_UNKNOWN", start)


def _write_program(path: Path, start: Sequence[str]) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(start)} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


def _environment(work: Path) -> dict[str, str]:
    return {
        "PATH": str(work / "programs"),
        "HOME": str(work / "home"),
        "TMPDIR": str(work / "tmp"),
        "USER": "user",
        "LANG": "C.UTF-8",
        # Scripts add to them, also under `set -u`.
        "PYTHONPATH": "",
        "LD_LIBRARY_PATH": "",
        "BASH_ENV": str(_HERE / "prelude.bash"),
    }


def _complaints(said: Sequence[str]) -> list[tuple[str, str]]:
    """Return bash's own messages; what tools say is left out."""
    found = [_COMPLAINT.fullmatch(line) for line in said]
    return [(f"{match['file']}:{match['line']}", match["words"]) for match in found if match]
