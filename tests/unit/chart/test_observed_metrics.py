"""Every metric that a dashboard or an alert asks for is exposed, and every one of the operator's is asked for."""

import urllib.request

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ppojob_api.v1alpha1.constants import STATUS_METRICS
from ppojob_operator.status_server import OperatorMetrics
from ppojob_trainer.telemetry.sinks.prometheus import PrometheusSink
from tests import chart_metrics
from tests.chart_metrics import Asked

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


def series_of(family: Metric) -> set[str]:
    """Return the names under which a family is asked for."""
    return {family.name + suffix for suffix in SUFFIXES[family.type]}


def test_the_operator_exposes_what_it_is_asked_for_and_nothing_that_nobody_looks_at() -> None:
    families = list(OperatorMetrics(lambda: {"Running": 1}).registry.collect())
    asked = chart_metrics.by_the_operators()

    assert asked.missing_from({name for family in families for name in series_of(family)}) == []
    assert [family.name for family in families if not series_of(family) & asked.names] == []


def test_a_trainer_that_measures_what_the_status_shows_serves_what_it_is_asked_for() -> None:
    measured = dict.fromkeys([*STATUS_METRICS, "pool/actor/busy_fraction"], 0.5)
    sink = PrometheusSink(0, address="127.0.0.1")
    try:
        sink.write(3, 1.7e9, measured)
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
            served = {family.name for family in text_string_to_metric_families(answer.read().decode())}
    finally:
        sink.close()

    assert chart_metrics.by_the_training().missing_from(served) == []


@pytest.mark.parametrize(
    ("exposed", "missing"),
    [
        ({"ppojob_step", "ppojob_pool_a_busy"}, []),
        ({"ppojob_step"}, ["ppojob_pool_.+_busy"]),
        ({"ppojob_pool_a_busy"}, ["ppojob_step"]),
    ],
)
def test_a_metric_that_is_not_exposed_is_found(exposed: set[str], missing: list[str]) -> None:
    asked = Asked(frozenset({"ppojob_step"}), frozenset({"ppojob_pool_.+_busy"}))

    assert asked.missing_from(exposed) == missing
