"""The interface of a sink; `metrics.MetricLogger` calls it, from one thread."""

from collections.abc import Mapping
from typing import Protocol

Metrics = Mapping[str, float]


class MetricSink(Protocol):
    """Takes the metrics of a step somewhere. What it raises is logged and does not stop the training."""

    def write(self, step: int, time: float, metrics: Metrics) -> None:
        """Take the metrics of one step; `time` is in seconds since 1970. Values may be non-finite."""

    def close(self) -> None:
        """Finish; nothing is written after it."""
