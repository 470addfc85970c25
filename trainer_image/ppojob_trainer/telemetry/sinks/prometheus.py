"""Prometheus' text exposition on a port, for those who ask for it: the metrics of the last step as gauges."""

import re

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from ppojob_trainer.telemetry.sinks.sink import Metrics

_FOREIGN = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusSink:
    """Serves `ppojob_step` and one gauge for each metric: `actor/ppo_kl` is `ppojob_actor_ppo_kl`."""

    def __init__(self, port: int, *, address: str) -> None:
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._server, self._thread = start_http_server(port, addr=address, registry=self._registry)
        self.port = self._server.server_port

    def write(self, step: int, time: float, metrics: Metrics) -> None:
        """Set the gauges."""
        for name, value in {"step": step, "last_step_timestamp_seconds": time, **metrics}.items():
            self._gauge(name).set(value)

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def _gauge(self, metric: str) -> Gauge:
        name = f"ppojob_{_FOREIGN.sub('_', metric)}"
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, f"{metric} of the last step", registry=self._registry)
        return self._gauges[name]
