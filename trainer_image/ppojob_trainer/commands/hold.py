"""`ppojob hold`: the preStop hook of Ray's pods. It delays a pod's deletion until its run has stopped gracefully.

    a process of a run is on this pod? -- no --> end; on the head, as soon as Ray handles SIGTERM
      | yes: create a file in the job's storage; the driver watches it (`main.monitor`), on whatever pod it runs
      |-- the driver acknowledges, finishes its step, saves a checkpoint and ends its workers --> end
      |-- the driver has ended, and workers are left to the next attempt (`survivors`): a file says so --> end them
      |-- it does not acknowledge, and the head has not answered for ten seconds: the head is lost --> end the workers
      `-- it does not acknowledge within a minute: it hangs --> end

A pod of an elastic pool (`follow`) requests no stop, because the run continues without it. It waits only if all pods of
the run are deleted at the same time, and another one has requested the stop: the engines stay until the run has ended.

If the head is lost, Ray itself ends the workers only after a minute, and the next attempt would wait for their GPUs. A
head that is deleted gracefully keeps its address until its own hook ends. It ends workers that are left too, for which
Ray would wait 20 s. Errors of reading or writing go to stderr.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
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
_HEAD_LOST_S = 10.0
"""Seconds without an answer of the head after which it is lost; its driver acknowledges sooner if it lives."""
_CONNECT_S = 2.0
_OTHERS_S = 5.0
"""Seconds in which the other pods of a run that is deleted request the stop."""


@dataclass(frozen=True)
class _Limits:
    """The longest waits, in seconds."""

    stop_s: float
    """For the end of a run whose driver has acknowledged the request."""
    acknowledge_s: float
    head_lost_s: float


@dataclass(frozen=True)
class _StopFiles:
    """Files in the job's folder."""

    request: Path
    """It requests the driver to stop."""
    acknowledgement: Path
    """The driver's answer."""
    end: Path
    """The driver has ended; processes that are left work for nobody."""

    def is_ended(self) -> bool:
        """Return whether the driver has ended."""
        return _exists(self.end)

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
        return _exists(self.request)

    def remove(self) -> None:
        """Delete request and answer, so that a later attempt does not find them."""
        try:
            self.request.unlink(missing_ok=True)
            self.acknowledgement.unlink(missing_ok=True)
        except OSError as error:
            _say(error)


def hold(
    job_file: Path,
    limit_s: float,
    processes: Path = PROCESSES,
    *,
    acknowledge_s: float = _ACKNOWLEDGE_S,
    head_lost_s: float = _HEAD_LOST_S,
    kill: Callable[[int, int], None] = os.kill,
) -> bool:
    """Wait until no process on this pod works for a run; return False if there still is one after the wait.

    Args:
        job_file: job.json, which names the job's folder.
        limit_s: the longest wait, in seconds.
        processes: the kernel's folder of processes.
        acknowledge_s: the longest wait for the driver's acknowledgement, in seconds.
        head_lost_s: the longest wait for a head that does not answer, in seconds.
        kill: sends a signal to a process.
    """
    limits = _Limits(limit_s, min(limit_s, acknowledge_s), head_lost_s)
    is_over = not any(_of_a_run(processes)) or _stopped_gracefully(job_file, processes, limits)
    if is_over:
        _end_left(processes, kill)
    _wait_for_ray(limit_s, processes)
    return is_over


def follow(job_file: Path, limit_s: float, processes: Path = PROCESSES, *, others_s: float = _OTHERS_S) -> bool:
    """Wait like `hold` if another pod requests the stop within `others_s`; else return True."""
    begin, stop_files, is_over = time.monotonic(), _stop_files(job_file), True
    while _is_running(processes, stop_files):
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


def _stopped_gracefully(job_file: Path, processes: Path, limits: _Limits) -> bool:
    """Request a stop, and return whether nothing here works for a run any more: it has stopped, or lost its head."""
    stop_files, is_acknowledged = _stop_files(job_file), False
    begin = answered = time.monotonic()
    while _is_running(processes, stop_files):
        # If this pod cannot request the stop, the operator still can.
        is_acknowledged = stop_files is None or stop_files.request_stop() or is_acknowledged
        if time.monotonic() - begin >= (limits.stop_s if is_acknowledged else limits.acknowledge_s):
            return False
        if is_acknowledged or _has_driver(processes) or _head_answers():
            answered = time.monotonic()
        elif time.monotonic() - answered >= limits.head_lost_s:
            break
        time.sleep(_POLL_S)
    if stop_files is not None:
        stop_files.remove()
    return True


def _head_answers() -> bool:
    """Return whether something accepts connections at Ray's address; True if the address is unknown."""
    host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    if not host or not port.isdecimal():
        return True
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S):
            return True
    except OSError:
        return False


def _takes_sigterm(processes: Path) -> bool:
    """Return whether the first process of the PID namespace has a handler for SIGTERM.

    On the head, that is the container's process. The kubelet sends the signal once, and the kernel gives it to a first
    process only if that has asked for it, which `ray start` does when Ray is up: a head that is deleted before would
    stay for its whole grace period. The pods of pools share a namespace, whose first process has a handler; Ray's
    processes there end without one.
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
    return _StopFiles(files.terminating(cluster), files.stop_acknowledged(cluster), files.run_ended(cluster))


def _exists(path: Path) -> bool:
    """Return whether the file exists; False if the storage fails."""
    try:
        return path.exists()
    except OSError as error:
        _say(error)
        return False


def _say(error: Exception, what: str = "cannot notify the trainer that this pod is being deleted") -> None:
    print(f"{what}: {error!r}", file=sys.stderr)  # noqa: T201


def _is_running(processes: Path, stop_files: _StopFiles | None) -> bool:
    """Return whether a driver is on this pod, or workers whose driver has not ended."""
    is_running = any(_of_a_run(processes))
    is_ended = is_running and stop_files is not None and stop_files.is_ended()
    return _has_driver(processes) if is_ended else is_running


def _has_driver(processes: Path) -> bool:
    return any(_DRIVER in arguments for _, arguments in _of_a_run(processes))


def _end_left(processes: Path, kill: Callable[[int, int], None]) -> None:
    """Terminate the workers that are left to the next attempt: it cannot use those on this pod."""
    left = [number for number, arguments in _of_a_run(processes) if arguments[0].startswith(_WORKER)]
    for number in left:
        try:
            kill(number, signal.SIGKILL)
        except OSError as error:
            # It has just ended, or is another user's.
            _say(error, f"cannot terminate process {number}")


def _of_a_run(processes: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the numbers and command lines of the processes of a run."""
    for folder in processes.iterdir():
        if folder.name.isdecimal() and _is_of_a_run(arguments := _arguments(folder)):
            yield int(folder.name), arguments


def _is_of_a_run(arguments: list[str]) -> bool:
    return _DRIVER in arguments or arguments[0].startswith(_WORKER)


def _arguments(folder: Path) -> list[str]:
    """Return the command line of a process; one that has just ended has none."""
    try:
        return (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]
