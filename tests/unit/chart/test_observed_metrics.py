"""Every metric and label that a dashboard or an alert names is exposed, and every metric of the operator is shown."""

from collections.abc import Iterator

import pytest
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

from ppojob_api.v1alpha1.constants import STATUS_METRICS
from ppojob_operator.status_server import OperatorMetrics
from ppojob_trainer.controller.phases import window_metrics
from ppojob_trainer.telemetry.sinks.prometheus import PrometheusSink
from ppojob_trainer.worker_groups.gpu_sampler import GpuUse
from ppojob_trainer.worker_groups.observation import Observed, observed_metrics
from tests.monitoring import expressions, simulation
from tests.monitoring.expressions import OF_JOBS_TARGETS, OF_TARGETS, Query

Exposed = dict[str, frozenset[str]]


@pytest.fixture(scope="module")
def simulated() -> Exposed:
    return simulation.labels_of(simulation.scraped())


@pytest.fixture(scope="module")
def of_the_operator(simulated: Exposed) -> Exposed:
    """Return what the operator's registry exposes; the labels are those of samples that it has given."""
    families = [family.name for family in OperatorMetrics().registry.collect()]
    return {
        name: labels | OF_TARGETS
        for name, labels in simulated.items()
        if any(name.startswith(family) for family in families)
    }


@pytest.fixture(scope="module")
def of_the_trainer() -> Iterator[Exposed]:
    """Return what a run with GPUs serves: what the status shows, and what its pools and calls are seen to do."""
    seen = [Observed("actor", 1, 10**9, GpuUse(10**9, 2 * 10**9, 0.5, 1))]
    metrics = dict.fromkeys(STATUS_METRICS, 0.5) | dict.fromkeys(simulation.OF_WEIGHTS, 1.0)
    metrics |= observed_metrics(seen, {"actor": "all"}) | window_metrics([], ["all"], 0.0, 1.0)
    sink = PrometheusSink(0, address="127.0.0.1")
    sink.write(3, 1.7e9, metrics)
    yield {
        sample.name: frozenset(sample.labels) | OF_JOBS_TARGETS
        for family in sink.registry.collect()
        for sample in family.samples
    }
    sink.close()


def test_what_is_asked_for_is_exposed(of_the_operator: Exposed, of_the_trainer: Exposed) -> None:
    of_ray = {f"ray_{name}": OF_JOBS_TARGETS for name in METRICS_GAUGES}
    exposed = {"up": OF_TARGETS, **of_ray, **of_the_trainer, **of_the_operator}

    assert [problem for query in expressions.all_queries() for problem in query.unknown(exposed)] == []


def test_every_metric_of_the_operator_is_queried() -> None:
    asked = {name for query in expressions.all_queries() for name in query.selectors}
    families = [family.name for family in OperatorMetrics().registry.collect()]

    assert [family for family in families if not any(name.startswith(family) for name in asked)] == []


def test_the_simulation_makes_up_no_metric(
    simulated: Exposed, of_the_operator: Exposed, of_the_trainer: Exposed
) -> None:
    real = {"up", *of_the_operator, *of_the_trainer, *(f"ray_{name}" for name in METRICS_GAUGES)}

    assert simulated.keys() - real == set()


@pytest.mark.parametrize(
    ("query", "problems"),
    [
        (Query("here", 'sum by (pool) (a{pool="x"})', "{{pool}}"), []),
        (Query("here", "b"), ["here: no metric b"]),
        (Query("here", 'a{role="x"}'), ["here: a has no label role"]),
        (Query("here", "sum by (role) (a)"), ["here: no metric has the label role"]),
        (Query("here", "a", "{{role}}"), ["here: no metric has the label role"]),
        (Query("here", "a * on (role) a"), ["here: no metric has the label role"]),
    ],
)
def test_what_is_not_exposed_is_found(query: Query, problems: list[str]) -> None:
    assert query.unknown({"a": frozenset({"pool"})}) == problems
