"""`python -m ppojob_trainer.commands.fetch --job FILE`: the program of the Job that the operator creates.

It reports to the operator's status endpoint at least every ten seconds. Why it failed is in the last report and in the
container's termination message, so the operator knows it without a connection too. Exit codes: 0 all is there; 3 no
other try can help, and the Job ends; 1 Kubernetes tries again.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ppojob_api.v1alpha1.progress import FETCH_REFUSED_EXIT_CODE, fetch_url
from ppojob_api.v1alpha1.resolve import JobFile, OtherVersionError
from ppojob_api.v1alpha1.secrecy import secret_values
from ppojob_api.v1alpha1.versions import own_version
from ppojob_trainer.commands.fetch.errors import FetchError, FetchRefusedError
from ppojob_trainer.commands.fetch.fetching import State, fetch_all
from ppojob_trainer.commands.fetch.report import report_of, watched
from ppojob_trainer.telemetry import ProgressReporter, configure_logging, redacted

logger = logging.getLogger(__name__)

_TERMINATION_MESSAGE = Path("/dev/termination-log")
_MAX_MESSAGE = 4000
"""Kubernetes keeps 4096 bytes."""
_ENDED_BY_SIGNAL = 143


def main(arguments: list[str] | None = None) -> int:
    """Fetch what the job file names; return the exit code."""
    configure_logging()
    parser = argparse.ArgumentParser(description="Fetch a job's models and data into its storage.")
    parser.add_argument("--job", type=Path, required=True, help="The job file.")
    parser.add_argument("--termination-message", type=Path, default=_TERMINATION_MESSAGE, help="File for the failure.")
    options = parser.parse_args(arguments)
    # Pods of other namespaces share the storage by its group.
    os.umask(0o002)
    try:
        job = JobFile.decode(options.job.read_text(), reader=own_version())
    except OtherVersionError as error:
        logger.error("%s", error)
        _write(options.termination_message, str(error))
        return FETCH_REFUSED_EXIT_CODE
    state = State()
    signal.signal(signal.SIGTERM, lambda number, frame: _leave(state, _ENDED_BY_SIGNAL))
    with _reporter(job) as reporter:
        failure = _run(job, state, reporter)
        message = redacted(str(failure), secret_values(job.spec, os.environ)) if failure else None
        if message is not None:
            logger.error("%s", message)
            _write(options.termination_message, message)
        if reporter is not None:
            reporter.update(report_of(state, job.uid, message))
    if failure is None:
        return 0
    return FETCH_REFUSED_EXIT_CODE if isinstance(failure, FetchRefusedError) else 1


def _run(job: JobFile, state: State, reporter: ProgressReporter | None) -> FetchError | None:
    def show(state: State) -> None:
        if reporter is None:
            return
        if reporter.fenced_out.is_set():
            logger.error("the PPOJob has ended or was deleted: the fetch ends too")
            _leave(state, 0)
        reporter.update(report_of(state, job.uid))

    try:
        with watched(state, show):
            fetch_all(job, state, f"{job.namespace}/{job.name} (pod {socket.gethostname()})")
    except FetchError as error:
        return error
    return None


@contextlib.contextmanager
def _reporter(job: JobFile) -> Iterator[ProgressReporter | None]:
    """Yield what reports to the operator; None where the job reports to nobody."""
    if job.reporting is None:
        yield None
        return
    reporting = job.reporting.model_copy(update={"url": fetch_url(job.reporting.url)})
    reporter = ProgressReporter(reporting)
    reporter.start()
    try:
        yield reporter
    finally:
        reporter.close()


def _write(path: Path, message: str) -> None:
    try:
        path.write_bytes(message.encode()[:_MAX_MESSAGE])
    except OSError as error:
        logger.warning("the message could not be written to %s: %s", path, error)


def _leave(state: State, code: int) -> None:
    """End at once. Downloads cannot be interrupted; the lock is released, so that the next fetch need not wait."""
    if state.lock is not None:
        state.lock.release()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
