"""What a fetch says while it runs: to the operator, and on the terminal of `ppojob run`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ppojob_api.v1alpha1.constants import MAX_SOURCES
from ppojob_api.v1alpha1.progress import FetchReport
from ppojob_trainer.commands.fetch.fetching import State

_INTERVAL_S = 5.0


def report_of(state: State, uid: str, message: str | None = None) -> FetchReport:
    """Return the report of a state; `message` says why the fetch failed."""
    done = state.done
    return FetchReport(
        uid=uid,
        address=state.address,
        # Files that huggingface_hub keeps beside a download count in the folder too.
        bytes=done if state.total is None else min(done, state.total),
        total_bytes=state.total,
        message=(message or state.message or "")[:4096] or None,
        sources=state.sources[:MAX_SOURCES],
    )


def line_of(state: State) -> str:
    """Return a state in one line."""
    report = report_of(state, "")
    size = "?" if report.total_bytes is None else f"{report.total_bytes / 1e9:.2f}"
    return "; ".join(filter(None, (f"{report.bytes / 1e9:.2f} of {size} GB", report.address, report.message)))


@contextmanager
def watched(state: State, show: Callable[[State], None], interval_s: float = _INTERVAL_S) -> Iterator[None]:
    """Call `show` with the state every few seconds, from a thread."""
    ended = threading.Event()

    def run() -> None:
        show(state)
        while not ended.wait(interval_s):
            show(state)

    thread = threading.Thread(target=run, name="fetch-report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
