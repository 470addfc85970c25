"""The dashboards' expressions in a real Prometheus, with three hours of simulated jobs from the real exporters."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import start_http_server

from ppojob_operator.plan import JobKey
from ppojob_operator.reconcile import JobState
from ppojob_operator.status_server import OperatorMetrics
from tests.monitoring import expressions, preview, prometheus, simulation
from tests.monitoring.prometheus import Line, Prometheus

DASHBOARDS = expressions.dashboards()
ALL = {"namespace": ".*", "ppojob": ".*", "operator": ".*"}
OF_ALL_CHOSEN = {"Time of the phases"}
"""Panels with one line for all chosen jobs."""
CHOICES: dict[str, dict[str, str]] = {
    "one namespace": {"namespace": "team-a"},
    "another namespace": {"namespace": "team-b"},
    "two namespaces": {"namespace": "team-a|team-b"},
    "one job": {"namespace": "team-a", "ppojob": "sums-ppo"},
    "two jobs": {"namespace": ".*", "ppojob": "sums-grpo|products"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if not prometheus.are_installed():
        pytest.skip(prometheus.MISSING)
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus.serving(folder, prometheus.load(simulation.scraped(), folder)) as started:
        yield started


def named(lines: list[Line]) -> dict[frozenset[tuple[str, str]], Line]:
    """Return series by their labels."""
    return {frozenset(line.labels.items()): line for line in lines}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_with_all_every_query_finds_something_and_legends_distinguish_its_series(server: Prometheus, name: str) -> None:
    dashboard = DASHBOARDS[name]
    found = preview.answers(server, dashboard, ALL)

    for panel in expressions.panels_of(dashboard):
        for query, lines in zip(panel["queries"], found[panel["title"]], strict=True):
            assert lines, f"{panel['title']}: {query['expr']} finds nothing"
            legends = [preview.name(query["legend"], line) for line in lines]
            assert len(set(legends)) == len(legends), f"{panel['title']}: {legends}"
            labels = set(re.findall(r"\{\{(\w+)\}\}", query["legend"]))
            assert all(labels <= line.labels.keys() for line in lines), f"{panel['title']}: {query['legend']}"


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_shows_the_series_of_all_that_belong_to_it(server: Prometheus, choice: str) -> None:
    chosen, dashboard = ALL | CHOICES[choice], DASHBOARDS["job"]
    everything, found = (preview.answers(server, dashboard, values) for values in (ALL, chosen))

    def belongs(labels: Mapping[str, str]) -> bool:
        job = labels.get("ppojob") or labels["pod"].rpartition("-")[0]
        return bool(re.fullmatch(chosen["namespace"], labels["namespace"]) and re.fullmatch(chosen["ppojob"], job))

    for title, of_queries in found.items():
        for lines, all_lines in zip(of_queries, everything[title], strict=True):
            if title in OF_ALL_CHOSEN:
                assert lines, title
                continue
            assert named(lines) == named([line for line in all_lines if belongs(line.labels)]), title


def test_a_namespace_without_a_failure_shows_what_stands_for_nothing(server: Prometheus) -> None:
    found = preview.answers(server, DASHBOARDS["job"], ALL | CHOICES["one job"])
    panels = {panel["title"]: panel for panel in expressions.panels_of(DASHBOARDS["job"])}

    silent = {title for title, of_queries in found.items() if not any(of_queries)}
    assert silent == {"Last failure"}
    assert all("empty" in panels[title] for title in silent)


def test_statistics_of_the_overview_count_the_jobs(server: Prometheus) -> None:
    found = preview.answers(server, DASHBOARDS["jobs"], ALL)
    stats = [panel["title"] for panel in expressions.panels_of(DASHBOARDS["jobs"]) if panel.get("kind") == "stat"]

    assert {title: found[title][0][0].points[-1][1] for title in stats} == {
        "Running": 2, "Waiting": 1, "Stalled": 1, "Failed, last day": 1, "Succeeded, last day": 1, "Ready GPUs": 4,
    }  # fmt: skip


def test_a_jobs_namespace_is_its_own_where_the_operator_is_scraped_as_the_chart_says(tmp_path: Path) -> None:
    """Scrape a real registry of the operator, with the labels that Kubernetes gives to its Service."""
    if not prometheus.are_installed():
        pytest.skip(prometheus.MISSING)
    metrics = OperatorMetrics()
    states = {JobKey("team-a", "sums"): JobState("Running")}
    metrics.ask(job_states=lambda: states, queue_depth=lambda: 0, left_alone=lambda: 0, leads=lambda: True)
    exporter, thread = start_http_server(0, addr="127.0.0.1", registry=metrics.registry)
    target: dict[str, Any] = {
        "targets": [f"127.0.0.1:{exporter.server_port}"],
        "labels": {"namespace": "system", "service": "ppojob"},
    }
    monitor = {"job_name": "ppojob", "scrape_interval": "1s", "honor_labels": True, "static_configs": [target]}
    try:
        with prometheus.serving(tmp_path, tmp_path / "data", yaml.safe_dump({"scrape_configs": [monitor]})) as server:
            prometheus.wait_until(lambda: server.now("ppojob_job_phase"), "the first scrape")

            def namespaces() -> list[list[str]]:
                queries = ("ppojob_job_phase", "ppojob_leader", f"ppojob_leader{{{expressions.OPERATOR}}}")
                return [[labels["namespace"] for labels in server.now(query)] for query in queries]

            # The series of one scrape need not be found at the same moment.
            prometheus.wait_until(lambda: all(namespaces()), "all series")
            assert namespaces() == [["team-a"], ["system"], ["system"]]
    finally:
        exporter.shutdown()
        exporter.server_close()
        thread.join(timeout=5)
