"""Dashboards show something for every choice of their variables, and a reader knows what each axis counts."""

import re

import pytest

from ppojob_operator.status_server.job_metrics import PHASES
from tests.monitoring import expressions
from tests.monitoring.expressions import Query

DASHBOARDS = expressions.dashboards()
PANELS = [
    pytest.param(panel, expressions.queries_of(name, {**dashboard, "rows": [{"panels": [panel]}]}), id=panel["title"])
    for name, dashboard in DASHBOARDS.items()
    for panel in expressions.panels_of(dashboard)
]
UNITS = {
    "none": "", "s": "seconds", "percentunit": "a share, 0 to 1", "bytes": "bytes", "decgbytes": "1e9 bytes",
    "GBs": "1e9 bytes per second", "cps": "per second", "ops": "per second", "reqps": "per second", "wps": "per second",
}  # fmt: skip
"""Units of Grafana, by its identifiers, and what a value in them is."""
OF_NAMES = (
    (r"ray_node_mem_\w+", "bytes"),
    (r".*_gb_per_s", "1e9 bytes per second"),
    (r".*_gb", "1e9 bytes"),
    (r".*_(ratio|fraction|clipfrac|utilization|mfu|explained_var)", "a share, 0 to 1"),
    (r".*(_seconds|_seconds_total|_seconds_bucket|timing_s|saved_s)", "seconds"),
)
"""What the value of a metric is, by its name; else it counts something."""


def unit_of(query: Query) -> set[str]:
    """Return what the values of an expression are."""
    if " / " in query.text:
        return {"a share, 0 to 1"}
    if re.match(r"count\b", query.text):
        return {""}
    if "rate(" in query.text and "histogram_quantile" not in query.text:
        return {"per second"}
    return {next((unit for name, unit in OF_NAMES if re.fullmatch(name, read)), "") for read in query.selectors}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_all_values_of_a_variable_at_once_match_something(name: str) -> None:
    dashboard = DASHBOARDS[name]
    queries = [*expressions.queries_of(name, dashboard), *expressions.variables_of(dashboard)]

    assert expressions.exact_matches_of_variables(queries) == []


def test_a_variable_that_is_compared_exactly_is_found() -> None:
    queries = [Query("panel", 'sum(a{n="$n"}) + sum(b{n=~"$n"}) + sum(c{n!="$n",m="x"})')]

    assert expressions.exact_matches_of_variables(queries) == ["panel: a{n='$n'}", "panel: c{n!='$n'}"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_selector_follows_the_variables(name: str) -> None:
    dashboard = DASHBOARDS[name]
    chosen = {match for each in re.findall(r'(\w+)=~"\$(\w+)"', dashboard["selected"]) for match in [each[0]]}

    for query in expressions.queries_of(name, dashboard):
        for metric, matchers in query.selectors.items():
            assert chosen <= {matcher.label for matcher in matchers}, f"{query.where}: {metric}"


@pytest.mark.parametrize(("panel", "queries"), PANELS)
def test_an_axis_says_what_it_counts_and_has_one_unit(panel: dict[str, str], queries: list[Query]) -> None:
    assert panel["axis"]
    assert set().union(*(unit_of(query) for query in queries)) == {UNITS[panel["unit"]]}


@pytest.mark.parametrize(
    ("expression", "unit"),
    [
        ("ppojob_response_length_mean", {""}),
        ("ppojob_response_length_clip_ratio", {"a share, 0 to 1"}),
        ("time() - max by (ppojob) (ppojob_job_last_report_timestamp_seconds)", {"seconds"}),
        ("ppojob_pool_memory_peak_gb", {"1e9 bytes"}),
        ("ppojob_pool_memory_peak_gb / ppojob_pool_memory_total_gb", {"a share, 0 to 1"}),
        ("sum(rate(ppojob_progress_reports_total[5m]))", {"per second"}),
        ("histogram_quantile(0.5, sum by (le) (rate(ppojob_reconcile_duration_seconds_bucket[5m])))", {"seconds"}),
        ("count by (phase) (ppojob_job_phase)", {""}),
    ],
)
def test_the_unit_of_an_expression_is_known(expression: str, unit: set[str]) -> None:
    assert unit_of(Query("panel", expression)) == unit


def test_the_timeline_names_every_phase() -> None:
    [panel] = [panel for panel in expressions.panels_of(DASHBOARDS["job"]) if panel.get("kind") == "state-timeline"]
    found = re.findall(r'(\d+) \* ppojob_job_phase\{SELECTED,phase="(\w+)"\}', panel["queries"][0]["expr"])

    assert panel["mappings"] == {int(value): phase for value, phase in found}
    assert tuple(panel["mappings"].values()) == PHASES
