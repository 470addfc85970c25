"""Prometheus' text exposition on a port, for those who ask for it: the metrics of the last step as gauges.

A part of a metric's name that is one of several (a phase, a role, a pool, a source) becomes a label, so that one
expression shows all of them: `pool/critic/busy_fraction` is `ppojob_pool_busy_fraction{pool="critic"}`.
"""

import re
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from ppojob_trainer.telemetry.sinks.sink import Metrics

_FOREIGN = re.compile(r"[^a-zA-Z0-9_]")
_LABELLED = (
    re.compile(r"(?P<name>timing_s|timing_per_token_ms|comm_(?:s|mb|gb_per_s|receivers|read_back))/(?P<phase>[^/]+)"),
    re.compile(r"(?P<name>perf/(?:mfu|max_memory_allocated_gb|max_memory_reserved_gb))/(?P<role>[^/]+)"),
    re.compile(r"(?P<group>pool)/(?P<pool>[^/]+)/(?P<measure>.+)"),
    re.compile(r"(?P<group>mixture)/(?P<source>[^/]+)/(?P<measure>.+)"),
    re.compile(r"(?P<name>comm_transport)/(?P<who>[^/]+)/(?P<transport>[^/]+)"),
)


@dataclass(frozen=True)
class Series:
    """Where a metric is served: the name of its gauge, and its labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


def series_of(metric: str) -> Series:
    """Return where a metric of a step is served: `actor/ppo_kl` is `ppojob_actor_ppo_kl`."""
    for pattern in _LABELLED:
        if match := pattern.fullmatch(metric):
            labels = match.groupdict()
            name = labels.pop("name", None) or f"{labels.pop('group')}_{labels.pop('measure')}"
            return Series(f"ppojob_{_FOREIGN.sub('_', name)}", labels)
    return Series(f"ppojob_{_FOREIGN.sub('_', metric)}")


class PrometheusSink:
    """Serves `ppojob_step`, `ppojob_last_step_timestamp_seconds` and each metric of the last step that had it."""

    def __init__(self, port: int, *, address: str) -> None:
        self.registry = CollectorRegistry()
        self._gauges: dict[str, tuple[Gauge, tuple[str, ...]]] = {}
        self._server, self._thread = start_http_server(port, addr=address, registry=self.registry)
        self.port = self._server.server_port

    def write(self, step: int, time: float, metrics: Metrics) -> None:
        """Set the gauges.

        Raises:
            ValueError: a metric would be a gauge that has other labels; the others are set.
        """
        clashes = []
        for metric, value in {"step": step, "last_step_timestamp_seconds": time, **metrics}.items():
            series = series_of(metric)
            gauge, labels = self._gauge(metric, series)
            if labels == tuple(series.labels):
                (gauge.labels(**series.labels) if labels else gauge).set(value)
            else:
                clashes.append(
                    f"{metric} would be {series.name} with the labels {list(series.labels)}, not {list(labels)}"
                )
        if clashes:
            raise ValueError(f"rename the metrics of your own worker group: {'; '.join(clashes)}")

    def _gauge(self, metric: str, series: Series) -> tuple[Gauge, tuple[str, ...]]:
        """Return the gauge of that name and the names of its labels."""
        if series.name not in self._gauges:
            labels = tuple(series.labels)
            words = f"{metric}{' and its like' if labels else ''}, of the last step that had it"
            self._gauges[series.name] = (Gauge(series.name, words, labels, registry=self.registry), labels)
        return self._gauges[series.name]

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
