"""`ppojob hold`: the preStop hook of Ray's pods. It delays a pod's deletion until its run has stopped gracefully.

    a process of a run is on this pod? -- no --> end, as soon as Ray handles SIGTERM
      | yes: create a file in the job's storage; the driver watches it (`main.monitor`), on whatever pod it runs
      |-- the driver acknowledges, finishes its step, saves a checkpoint and exits, and with it all its workers --> end
      `-- it does not acknowledge within a minute: it hangs --> end

A pod of an elastic pool (`follow`) requests no stop, because the run continues without it. It waits only if all pods of
the run are deleted at the same time, and another one has requested the stop: the engines stay until the run has ended.

It reads only this pod's processes, so it needs no connection: if the head is gone, Ray itself terminates the workers.
It terminates no process, and reports errors of reading or writing on stderr.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ppojob_api.v1alpha1.constants import EnvName
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_trainer.telemetry import RunFiles

__all__ = ["follow", "hold"]

PROCESSES = Path("/proc")
_DRIVER = "ppojob_trainer.main"
"""Module that the operator submits."""
_WORKER = "ray::WorkerProcess"
"""Ray's names for the processes of `worker_groups`."""
_POLL_S = 0.5
_STARTING_S = 60.0
"""Seconds to wait for Ray if the pod is deleted while Ray starts."""
_ACKNOWLEDGE_S = 60.0
"""Seconds to wait for the driver's acknowledgement; a driver that is just starting needs some of it."""


_OTHERS_S = 5.0
"""Seconds in which the other pods of a run that is deleted request the stop."""


@dataclass(frozen=True)
class _StopFiles:
    """Two files in the job's folder."""

    request: Path
    """It requests the driver to stop."""
    acknowledgement: Path
    """The driver's answer."""

    def request_stop(self) -> bool:
        """Request a stop; return whether the driver has acknowledged it, or the storage failed."""
        try:
            # Write it repeatedly: a driver that starts only now deletes the files that it finds.
            self.request.touch()
            return self.acknowledgement.exists()
        except OSError as error:
            _say(error)
            return True

    def is_requested(self) -> bool:
        """Return whether some pod has requested a stop."""
        try:
            return self.request.exists()
        except OSError as error:
            _say(error)
            return False

    def remove(self) -> None:
        """Delete both files, so that a later attempt does not find them."""
        try:
            self.request.unlink(missing_ok=True)
            self.acknowledgement.unlink(missing_ok=True)
        except OSError as error:
            _say(error)


def hold(job_file: Path, limit_s: float, processes: Path = PROCESSES, *, acknowledge_s: float = _ACKNOWLEDGE_S) -> bool:
    """Wait until no process of a run is on this pod; return False if there still is one after the wait.

    Args:
        job_file: job.json, which names the job's folder.
        limit_s: the longest wait, in seconds.
        processes: the kernel's folder of processes.
        acknowledge_s: the longest wait for the driver's acknowledgement, in seconds.
    """
    is_over = not any(_of_a_run(processes)) or _stopped_gracefully(job_file, limit_s, processes, acknowledge_s)
    _wait_for_ray(limit_s, processes)
    return is_over


def follow(job_file: Path, limit_s: float, processes: Path = PROCESSES, *, others_s: float = _OTHERS_S) -> bool:
    """Wait like `hold` if another pod requests the stop within `others_s`; else return True."""
    begin, stop_files, is_over = time.monotonic(), _stop_files(job_file), True
    while any(_of_a_run(processes)):
        waited = time.monotonic() - begin
        if waited >= others_s and (stop_files is None or not stop_files.is_requested()):
            break
        if waited >= limit_s:
            is_over = False
            break
        time.sleep(_POLL_S)
    _wait_for_ray(limit_s, processes)
    return is_over


def _wait_for_ray(limit_s: float, processes: Path) -> None:
    end = time.monotonic() + min(limit_s, _STARTING_S)
    while not _takes_sigterm(processes) and time.monotonic() < end:
        time.sleep(_POLL_S)


def _stopped_gracefully(job_file: Path, limit_s: float, processes: Path, acknowledge_s: float) -> bool:
    begin, stop_files, is_acknowledged = time.monotonic(), _stop_files(job_file), False
    while any(_of_a_run(processes)):
        # If this pod cannot request the stop, the operator still can.
        is_acknowledged = stop_files is None or stop_files.request_stop() or is_acknowledged
        if time.monotonic() - begin >= (limit_s if is_acknowledged else min(limit_s, acknowledge_s)):
            return False
        time.sleep(_POLL_S)
    if stop_files is not None:
        stop_files.remove()
    return True


def _takes_sigterm(processes: Path) -> bool:
    """Return whether the container's first process has a handler for SIGTERM.

    The kubelet sends it once, and the kernel gives it to a first process only if that has asked for it, which `ray
    start` does when Ray is up: a pod that is deleted before would stay for its whole grace period.
    """
    try:
        lines = (processes / "1" / "status").read_text().splitlines()
    except OSError:
        return True
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), -1)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def _stop_files(job_file: Path) -> _StopFiles | None:
    """Return the files; None if the job's folder is unknown."""
    try:
        job = JobFile.model_validate_json(job_file.read_text(encoding="utf-8"), extra="ignore")
        files, cluster = RunFiles(Path(job.root)), os.environ[EnvName.RAY_CLUSTER]
    except (OSError, ValueError, KeyError) as error:
        _say(error)
        return None
    return _StopFiles(files.terminating(cluster), files.stop_acknowledged(cluster))


def _say(error: Exception) -> None:
    print(f"cannot notify the trainer that this pod is being deleted: {error!r}", file=sys.stderr)  # noqa: T201


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
