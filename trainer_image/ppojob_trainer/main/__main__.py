"""`python -m ppojob_trainer.main`: the command that the operator submits to the cluster.

    --job /etc/ppojob/job.json --hash H --generation G --attempt N

It waits for the file with that hash, because a mounted ConfigMap may be a minute old, and then runs the job. On failure
the last line of its log, and of the copy in the storage, is the failure record. SIGTERM and SIGINT cause a graceful
stop.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ppojob_api.v1alpha1.constants import CONFIG_MOUNT_PATH, JOB_FILE
from ppojob_api.v1alpha1.progress import FailureRecord
from ppojob_api.v1alpha1.resolve import JobFile, driver_log
from ppojob_api.v1alpha1.secrecy import secret_values
from ppojob_api.v1alpha1.versions import own_version
from ppojob_trainer.main.failures import JobFileMissingError, failure_record, interrupted
from ppojob_trainer.main.run import run_job
from ppojob_trainer.telemetry import OutputTee, configure_logging, redacted, tee_output

logger = logging.getLogger(__name__)

JOB_FILE_TIMEOUT_S = 120.0


def main(arguments: list[str] | None = None) -> int:
    """Run the job; return the exit code."""
    configure_logging()
    options = _parse(arguments)
    stop = threading.Event()

    def handle(_number: int, _frame: object) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    output = _Output()
    record = _run(options, stop, output)
    if record is None:
        return 0
    output.end(record)
    return record.exit_code


class _Output:
    """Copies what this process prints to the job's storage, once the job file was read."""

    def __init__(self) -> None:
        self._tee: OutputTee | None = None
        self._secrets: list[str] = []

    def copy_to(self, path: Path, secrets: list[str]) -> None:
        """Copy all further output to a file too, without secrets: the operator shows the end of the log."""
        self._secrets = secrets
        self._tee = tee_output(path, secrets)

    def end(self, record: FailureRecord) -> None:
        """Write the record as the last line: the operator reads it from the log, which outlives the connection."""
        last_line = record.model_copy(update={"message": redacted(record.message, self._secrets)}).to_log_line()
        if self._tee is not None:
            # Earlier output still passes through the copiers of two streams and could arrive after it.
            self._tee.close()
            # The storage may be what failed; Ray's own log has the line in any case.
            with contextlib.suppress(OSError), self._tee.path.open("a", encoding="utf-8") as copy:
                copy.write(last_line + "\n")
        sys.stderr.flush()
        sys.stdout.write(last_line + "\n")
        sys.stdout.flush()


def wait_for_job(path: Path, digest: str, timeout_s: float, stop: threading.Event) -> JobFile:
    """Return the job, once the file has the hash `digest`.

    Raises:
        JobFileMissingError: the file did not have the hash in time.
        OtherVersionError: the operator is of another version, and the job uses what this trainer does not know.
    """
    deadline = time.monotonic() + timeout_s
    seen = "there is no such file"
    while time.monotonic() < deadline and not stop.is_set():
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            if JobFile.digest(text) == digest:
                return JobFile.decode(text, reader=own_version())
            seen = f"the file there has the hash {JobFile.digest(text)}"
        # Not stop.wait(): the signal handler sets it in this thread and would deadlock on the lock that wait() holds.
        time.sleep(1.0)
    raise JobFileMissingError(
        f"{path} with the hash {digest} did not appear within {timeout_s:g} s: {seen}. "
        "The ConfigMap may not be mounted, or a newer submission has replaced it"
    )


def _run(options: argparse.Namespace, stop: threading.Event, output: _Output) -> FailureRecord | None:
    try:
        job = wait_for_job(options.job, options.hash, JOB_FILE_TIMEOUT_S, stop)
        # Not earlier: the job file says where the logs go.
        output.copy_to(Path(driver_log(job.root, options.attempt)), secret_values(job.spec, os.environ))
        logger.info(
            "job %s/%s, generation %d, attempt %d", job.namespace, job.name, options.generation, options.attempt
        )
        outcome = run_job(job, attempt=options.attempt, stop=stop, has_successor=True)
    except Exception as error:
        logger.exception("the job failed")
        return failure_record(error)
    if outcome.is_finished:
        logger.info("all %d steps are done", outcome.step)
        return None
    # No matter who requested the stop: for Ray, a job has succeeded only if all its steps are done.
    return interrupted(outcome.step)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ppojob_trainer.main", description="Runs a PPOJob on its Ray cluster."
    )
    parser.add_argument("--job", type=Path, default=Path(CONFIG_MOUNT_PATH) / JOB_FILE, help="the job file")
    parser.add_argument("--hash", required=True, help="SHA-256 of the job file that is meant")
    parser.add_argument("--generation", type=int, required=True, help="generation of the PPOJob's spec")
    parser.add_argument("--attempt", type=int, required=True, help="number of this attempt, from 0")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
