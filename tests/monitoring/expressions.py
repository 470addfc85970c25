"""The expressions of the chart's dashboards and alerts, parsed: which metrics and labels they name.

The chart's tests compare them with what the operator, the trainer and Ray expose.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

FILES = Path(__file__).resolve().parents[2] / "charts" / "ppojob" / "files"
OF_TARGETS = frozenset({"namespace", "pod", "service", "container", "endpoint", "instance", "job"})
"""Labels that Prometheus gives each series of a target."""
OF_JOBS_TARGETS = OF_TARGETS | {"ppojob"}
"""Those of a job's pods: the chart's PodMonitor adds one."""
OPERATOR = 'namespace="system",service="ppojob"'
"""What the chart makes of OPERATOR for a release `ppojob` in namespace `system`."""
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)")


@dataclass(frozen=True)
class Matcher:
    """One condition of a selector, such as `phase="Failed"`."""

    label: str
    operator: str
    """`=`, `!=`, `=~` or `!~`."""
    value: str


@dataclass(frozen=True)
class Query:
    """An expression, and where it stands."""

    where: str
    text: str
    legend: str = ""

    @property
    def selectors(self) -> dict[str, frozenset[Matcher]]:
        """The metrics that it reads, each with all conditions on it."""
        found: dict[str, frozenset[Matcher]] = {}
        for node in _nodes(self.text):
            if isinstance(node, promql_parser.VectorSelector):
                assert node.name, f"{self.where}: a selector without the name of a metric: {node.prettify()}"
                matchers = {Matcher(each.name, _sign(each.op), each.value) for each in node.matchers.matchers}
                found[node.name] = found.get(node.name, frozenset()) | matchers
        return found

    @property
    def labels(self) -> set[str]:
        """The labels that it groups by, joins on, or shows in its legend."""
        found = set(re.findall(r"\{\{(\w+)\}\}", self.legend))
        for node in _nodes(self.text):
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                found |= set(node.modifier.labels)
            if isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
                matching = node.modifier.matching
                found |= set() if matching is None else set(matching.labels)
        return found

    def unknown(self, exposed: dict[str, frozenset[str]]) -> list[str]:
        """Return the metrics and labels that are named here and not exposed.

        Args:
            exposed: the labels of each metric, by its name.
        """
        read = self.selectors
        problems = [f"{self.where}: no metric {name}" for name in read if name not in exposed]
        problems += [
            f"{self.where}: {name} has no label {matcher.label}"
            for name, matchers in read.items()
            for matcher in sorted(matchers, key=str)
            if matcher.label not in exposed.get(name, {matcher.label})
        ]
        known = frozenset().union(*(exposed.get(name, frozenset()) for name in read))
        return problems + [f"{self.where}: no metric has the label {label}" for label in sorted(self.labels - known)]


def dashboards() -> dict[str, dict[str, Any]]:
    """Return the short forms of the dashboards, by the name of their files."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted((FILES / "dashboards").glob("*.yaml"))}


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of all rows."""
    return [panel for row in dashboard["rows"] for panel in row["panels"]]


def queries_of(name: str, dashboard: dict[str, Any]) -> list[Query]:
    """Return what the panels of a dashboard ask for."""
    selected = dashboard.get("selected", "")
    return [
        Query(f"{name}: {panel['title']}", query["expr"].replace("SELECTED", selected), query["legend"])
        for panel in panels_of(dashboard)
        for query in panel["queries"]
    ]


def variables_of(dashboard: dict[str, Any]) -> list[Query]:
    """Return the selectors whose labels are the values of a dashboard's variables."""
    found = (re.fullmatch(r"label_values\((.+), (\w+)\)", each["query"]) for each in dashboard["variables"])
    return [Query("variable", match[1], f"{{{{{match[2]}}}}}") for match in found if match]


def alert_rules() -> dict[str, Any]:
    """Return the groups of alerts as Prometheus takes them."""
    rules: dict[str, Any] = yaml.safe_load((FILES / "alerts.yaml").read_text().replace("OPERATOR", OPERATOR))
    return rules


def alerts() -> list[Query]:
    """Return the expressions of all alerts."""
    return [Query(rule["alert"], rule["expr"]) for group in alert_rules()["groups"] for rule in group["rules"]]


def all_queries() -> list[Query]:
    """Return everything that dashboards and alerts ask for."""
    found = dashboards()
    asked = [query for name, each in found.items() for query in [*queries_of(name, each), *variables_of(each)]]
    return [*asked, *alerts()]


def exact_matches_of_variables(queries: Sequence[Query]) -> list[str]:
    """Return the conditions that compare a variable by `=` or `!=`: all values at once match nothing there."""
    return [
        f"{query.where}: {name}{{{matcher.label}{matcher.operator}{matcher.value!r}}}"
        for query in queries
        for name, matchers in query.selectors.items()
        for matcher in matchers
        if matcher.operator in ("=", "!=") and _VARIABLE.search(matcher.value)
    ]


def _sign(operator: object) -> str:
    return {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}[str(operator).rpartition(".")[2]]


def _nodes(text: str) -> Iterator[promql_parser.Expr]:
    found: list[promql_parser.Expr] = []
    promql_parser.walk(promql_parser.parse(text), found.append)
    yield from found
