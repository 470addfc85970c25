"""`ppojob hold`: the preStop hook of Ray's pods. It holds a pod until the run on it has stopped in order.

    a process of a run is on this pod? -- no --> end at once: the pod goes as any other
      | yes: leave a file in the job's storage, which the driver watches (`main.monitor`), wherever it runs
      `-- the driver finishes its step, puts a checkpoint down and ends, and with it all its workers --> end

It looks at this pod's processes only, so it needs no connection to anybody: where the head is gone, Ray itself ends
the workers. It never kills, and what it cannot read or write it says on stderr.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ppojob_api.v1alpha1.constants import EnvName
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_trainer.telemetry import RunFiles

__all__ = ["hold"]

PROCESSES = Path("/proc")
_DRIVER = "ppojob_trainer.main"
"""Module that the operator submits."""
_WORKER = "ray::WorkerProcess"
"""How Ray calls the processes of `worker_groups`."""
_POLL_S = 0.5


def hold(job_file: Path, limit_s: float, processes: Path = PROCESSES) -> bool:
    """Wait until no process of a run is on this pod; return False if there still is one after `limit_s` seconds.

    Args:
        job_file: job.json, which names the job's folder.
        limit_s: the longest wait.
        processes: the kernel's folder of processes.
    """
    if not any(_of_a_run(processes)):
        return True
    end, sign = time.monotonic() + limit_s, _sign(job_file)
    while any(_of_a_run(processes)):
        if time.monotonic() >= end:
            return False
        if sign is not None:
            # Again and again: a driver that begins only now takes away what it finds.
            sign.touch()
        time.sleep(_POLL_S)
    if sign is not None:
        sign.unlink(missing_ok=True)
    return True


def _sign(job_file: Path) -> Path | None:
    """Return the file that asks the driver to stop; None where it cannot be asked: the operator may do so too."""
    try:
        job = JobFile.model_validate_json(job_file.read_text(encoding="utf-8"))
        return RunFiles(Path(job.root)).leaving(os.environ[EnvName.RAY_CLUSTER])
    except (OSError, ValueError, KeyError) as error:
        print(f"the trainer cannot be told that this pod is leaving: {error!r}", file=sys.stderr)  # noqa: T201
        return None


def _of_a_run(processes: Path) -> Iterator[str]:
    """Yield the ids of the processes of a run."""
    for folder in processes.iterdir():
        if folder.name.isdecimal() and _is_of_a_run(_arguments(folder)):
            yield folder.name


def _is_of_a_run(arguments: list[str]) -> bool:
    return _DRIVER in arguments or arguments[0].startswith(_WORKER)


def _arguments(folder: Path) -> list[str]:
    """Return the command line of a process; one that has just ended has none."""
    try:
        return (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]
