"""A thread between the trainer and a sink that uses the network: no step waits for a slow or unavailable service."""

from __future__ import annotations

import queue
import threading
import time as clock
from collections.abc import Callable
from functools import partial

from ppojob_trainer.telemetry.sinks.sink import Metrics, MetricSink

MAX_WAITING = 1000
"""Steps that may wait for the service; metrics of further steps are lost, which is reported."""


class BackgroundSink:
    """Hands the metrics to `sink` in their order."""

    def __init__(self, sink: MetricSink, *, close_timeout_s: float = 60.0) -> None:
        self._sink = sink
        self._close_timeout_s = close_timeout_s
        self._waiting: queue.Queue[tuple[int, float, Metrics] | None] = queue.Queue(MAX_WAITING)
        self._error: Exception | None = None
        self._name = type(sink).__name__
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def write(self, step: int, time: float, metrics: Metrics) -> None:
        """Queue the metrics.

        Raises:
            RuntimeError: an earlier write failed, or too many wait; the message has the sink's name.
        """
        try:
            self._waiting.put_nowait((step, time, dict(metrics)))
        except queue.Full:
            raise RuntimeError(f"{self._name}: {MAX_WAITING} steps wait for the service, this one is lost") from None
        self._raise_error()

    def close(self) -> None:
        """Wait for what is queued, a minute at most.

        Raises:
            RuntimeError: not all arrived.
        """
        deadline = clock.monotonic() + self._close_timeout_s
        try:
            self._waiting.put(None, timeout=self._close_timeout_s)
        except queue.Full:
            raise RuntimeError(f"{self._name}: the service accepts nothing, so the last metrics are lost") from None
        self._thread.join(max(deadline - clock.monotonic(), 0.1))
        if self._thread.is_alive():
            raise RuntimeError(f"{self._name}: {self._waiting.qsize()} steps did not arrive in time and are lost")
        self._raise_error()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._try(partial(self._sink.write, *item))
        self._try(self._sink.close)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised in the trainer's thread at the next write
            self._error = error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"{self._name}: {type(error).__name__}: {error}") from error
