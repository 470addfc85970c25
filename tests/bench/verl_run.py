"""verl on the benchmark's work, as a separate process in an interpreter that has verl. Called by `bench_split`.

Nothing of verl is changed, and nothing of it is imported here. Its metrics are read from what its file logger writes:
a line of JSON for each step, with the names that we use too. A step's time is verl's: it does not include the work
between steps, such as metrics and logs. verl needs flash-attn, without which it does not load a critic, and a separate
environment: its queue (TransferQueue 0.1.11) installs a package `tests`, which hides ours.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ppojob_api.v1alpha1.spec import PPOJobSpec
from tests.bench.measurement import WARM_UP_STEPS, Run
from tests.bench.verl_settings import COLOCATED, Schedule, overrides
from tests.bench.whole_run import RUN_LIMIT_S
from tests.bench.workload import Size

NEEDED = ("verl", "vllm", "flash_attn")
_PROBE = f"""
import importlib.metadata, importlib.util, json
missing = [name for name in {NEEDED!r} if importlib.util.find_spec(name) is None]
if not missing:
    import verl
print(json.dumps([missing, None if missing else importlib.metadata.version("verl")]))
"""
_PROBE_LIMIT_S = 120.0
_POLL_S = 0.2
_GRACE_S = 10.0


class NoVerlError(RuntimeError):
    """An interpreter cannot run verl; the message says why, and what to do."""


@dataclass(frozen=True)
class Verl:
    """An interpreter that can import verl, and verl's version."""

    python: str
    version: str

    @property
    def name(self) -> str:
        """What its column is called."""
        return f"verl {self.version}"


def find(python: str) -> Verl:
    """Return verl as the interpreter has it.

    Raises:
        NoVerlError: the interpreter does not have verl, or does not start.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            env=_environment(python),
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoVerlError(_absent(python, str(error))) from error
    if done.returncode != 0:
        raise NoVerlError(_absent(python, done.stderr.strip().rpartition("\n")[2]))
    missing, version = json.loads(done.stdout.splitlines()[-1])
    if missing:
        raise NoVerlError(_absent(python, f"it has no {', no '.join(missing)}"))
    return Verl(python, version)


def _absent(python: str, reason: str) -> str:
    return (
        f"--verl: {python} cannot run verl: {reason}. Give the interpreter of an environment that has it: "
        "`pip install verl==0.9.1 vllm flash-attn`, then --verl ENVIRONMENT/bin/python"
    )


def measure_verl(verl: Verl, spec: PPOJobSpec, size: Size, folder: Path, schedule: Schedule = COLOCATED) -> Run:
    """Run verl to its end; a finished run of the same settings in the folder is read, not repeated.

    Args:
        spec: the job with all roles in one pool; resolved.
        schedule: how verl trains it.

    Raises:
        RuntimeError: it failed, or took too long; the message says where its log is.
    """
    finished, file = folder / "finished.json", folder / "settings.json"
    prompts = folder / "prompts.parquet"
    arguments = ["-m", schedule.module, *overrides(spec, size, prompts, folder, schedule)]
    text = json.dumps([verl.version, *arguments], indent=1)
    if not (finished.exists() and file.read_text(encoding="utf-8") == text):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
        write_prompts(spec, prompts)
        finished.write_text(json.dumps({"first_step_s": _run(verl, arguments, folder)}), encoding="utf-8")
    return read(verl.name + schedule.name, folder)


def write_prompts(spec: PPOJobSpec, target: Path) -> None:
    """Write the job's prompts as the table that verl reads: its columns are those of our lines."""
    files = spec.data.train.files
    assert files is not None, "the workload is of files"
    rows = [json.loads(line) for path in files.paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target)


def read(name: str, folder: Path) -> Run:
    """Read what a run has left: the metrics of the steps after the warm-up."""
    first = json.loads((folder / "finished.json").read_text(encoding="utf-8"))["first_step_s"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return Run(name, first, [_numbers(row["data"]) for row in rows if row["step"] > WARM_UP_STEPS])


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _run(verl: Verl, arguments: Sequence[str], folder: Path) -> float:
    """Run it, end all that it started, and return the seconds until its first step was done."""
    log, metrics = folder / "log.txt", folder / "metrics.jsonl"
    command = [verl.python, *arguments]
    environment = _environment(verl.python) | {"VERL_FILE_LOGGER_PATH": str(metrics)}
    with log.open("w", encoding="utf-8") as output:
        # A separate session, by which its Ray and vLLM's processes are found again.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
        )
        try:
            first = _wait(process, metrics)
            code, said = process.poll(), log.read_text(encoding="utf-8")[-3000:]
        finally:
            _end(process)
    if code != 0 or first is None:
        reason = f"was not done after {RUN_LIMIT_S:.0f} s" if code is None else f"ended with {code}"
        raise RuntimeError(f"{verl.name} {reason}: see {log}\n{said}")
    return first


def _wait(process: subprocess.Popen[bytes], metrics: Path) -> float | None:
    """Wait for the end or the limit of time; return the seconds to the first line of the metrics, None without one."""
    started, first, is_over = time.monotonic(), None, False
    while not is_over:
        # Before the metrics are looked for: the last ones are written just before the end.
        is_over = process.poll() is not None or time.monotonic() - started >= RUN_LIMIT_S
        if first is None and metrics.exists() and metrics.stat().st_size:
            first = time.monotonic() - started
        if not is_over:
            time.sleep(_POLL_S)
    return first


def _environment(python: str) -> dict[str, str]:
    """Return the variables of verl's processes: ours, but for the address of a running Ray, which it would join."""
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    if python != sys.executable:
        # What is on the path belongs to this interpreter.
        inherited.pop("PYTHONPATH", None)
    return {
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # As for our own engines: see `engines.rollout.options`.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **inherited,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of the session, and wait until the first is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _GRACE_S
        while (left := _session(process.pid)) and time.monotonic() < deadline:
            for pid in left:
                _send(pid, number)
            time.sleep(_POLL_S)
            process.poll()
    process.wait(_GRACE_S)


def _session(leader: int) -> list[int]:
    """Return the processes of a session, the leader's included."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_in(entry, leader)]


def _is_in(entry: Path, leader: int) -> bool:
    try:
        return os.getsid(int(entry.name)) == leader
    except ProcessLookupError:
        return False


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
