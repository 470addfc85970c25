"""The metrics of each step, to every sink. The trainer's loop calls `log` once per step.

The error of a sink is logged, at most once a minute, and does not stop the training. An error on opening a sink does,
because a run that cannot write its metrics from the start is not worth its GPUs.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from ppojob_trainer.telemetry.eta import Eta
from ppojob_trainer.telemetry.run_files import RunFiles
from ppojob_trainer.telemetry.sinks.console import ConsoleSink
from ppojob_trainer.telemetry.sinks.json_lines import JsonLinesSink
from ppojob_trainer.telemetry.sinks.picture import PictureSink
from ppojob_trainer.telemetry.sinks.sink import MetricSink

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_COMPLAINTS = 60.0


class MetricLogger:
    """Writes the metrics of each step to all sinks."""

    def __init__(self, sinks: Sequence[MetricSink], eta: Eta) -> None:
        self._sinks = list(sinks)
        self._eta = eta
        self._complained_at = -math.inf

    @classmethod
    def open(
        cls,
        files: RunFiles,
        *,
        total_steps: int,
        resume_step: int = 0,
        prometheus: tuple[str, int] | None = None,
        trackers: Sequence[MetricSink] = (),
        is_console: bool = True,
    ) -> Self:
        """Return a logger with all sinks; what an earlier attempt wrote after `resume_step` is taken out.

        Args:
            prometheus: address and port where the metrics are served. A port that is taken is logged, and no more.

        Raises:
            MetricsUnreadableError: metrics.jsonl holds something else than records.
            OSError: a file cannot be written.
        """
        # TensorBoard takes a second to import, and Prometheus is optional.
        from ppojob_trainer.telemetry.sinks.tensorboard import TensorBoardSink

        eta = Eta(total_steps)
        sinks: list[MetricSink] = [
            JsonLinesSink(files.metrics, resume_step=resume_step),
            TensorBoardSink(files.tensorboard, resume_step=resume_step),
            PictureSink(files),
            *trackers,
        ]
        if is_console:
            sinks.append(ConsoleSink(eta))
        if prometheus is not None:
            sinks += _prometheus(*prometheus)
        return cls(sinks, eta)

    def set_total_steps(self, total_steps: int) -> None:
        """Set a new length of the run while it runs."""
        self._eta.total_steps = total_steps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write all metrics of one step, its validation included; a validation before training is step 0."""
        now = time.time()
        self._eta.tick(step, now)
        for sink in self._sinks:
            try:
                sink.write(step, now, metrics)
            except Exception as error:  # noqa: BLE001 - a full disk must not end a training that goes well
                self._complain(sink, error)

    def close(self) -> None:
        """Finish every sink and draw the last picture; calling it again does nothing."""
        while self._sinks:
            sink = self._sinks.pop(0)
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - the other sinks must be closed too
                self._complained_at = -math.inf
                self._complain(sink, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _complain(self, sink: MetricSink, error: Exception) -> None:
        if time.monotonic() - self._complained_at >= _SECONDS_BETWEEN_COMPLAINTS:
            self._complained_at = time.monotonic()
            _log.warning(
                "%s lost metrics, training continues: %s: %s", type(sink).__name__, type(error).__name__, error
            )


def _prometheus(address: str, port: int) -> list[MetricSink]:
    from ppojob_trainer.telemetry.sinks.prometheus import PrometheusSink

    try:
        sink = PrometheusSink(port, address=address)
    except OSError as error:
        # On one's own machine another run has it; the metrics are in five other places.
        _log.warning("no /metrics on %s:%d: %s; telemetry.prometheusPort chooses another", address, port, error)
        return []
    _log.info("metrics of the last step: http://%s:%d/metrics", address, sink.port)
    return [sink]
