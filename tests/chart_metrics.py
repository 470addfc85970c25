"""The metrics that the chart's dashboards and alerts ask for, by who exposes them.

The chart's tests compare them with the operator's registry, and those of the trainer with what a run really serves.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILES = Path(__file__).resolve().parents[1] / "charts" / "ppojob" / "files"
_QUOTED = re.compile(r'"[^"]*"')
_NAME = re.compile(r"\bppojob_\w+")
_BY_PATTERN = re.compile(r'__name__=~"([^"]*)"')


@dataclass(frozen=True)
class Asked:
    """What expressions of PromQL ask for."""

    names: frozenset[str]
    patterns: frozenset[str]

    def missing_from(self, exposed: set[str]) -> list[str]:
        """Return what none of the exposed names answers."""
        unmatched = [pattern for pattern in self.patterns if not any(re.fullmatch(pattern, name) for name in exposed)]
        return sorted([*(self.names - exposed), *unmatched])


def by_the_operators() -> Asked:
    """Return what the operator is asked for."""
    return _asked([*_of_dashboard("operator"), *_of_alerts("ppojob-operator")])


def by_the_training() -> Asked:
    """Return what a job's head pod is asked for."""
    return _asked([*_of_dashboard("training"), *_of_alerts("ppojob-training")])


def _of_dashboard(name: str) -> list[str]:
    dashboard = yaml.safe_load((FILES / "dashboards" / f"{name}.yaml").read_text())
    panels = [panel for row in dashboard["rows"] for panel in row["panels"]]
    queries = [query["expr"] for panel in panels for query in panel["queries"]]
    return [*queries, *(variable["query"] for variable in dashboard["variables"])]


def _of_alerts(group: str) -> list[str]:
    groups: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    return [rule["expr"] for each in groups if each["name"] == group for rule in each["rules"]]


def _asked(expressions: list[str]) -> Asked:
    names = {name for expression in expressions for name in _NAME.findall(_QUOTED.sub("", expression))}
    patterns = {pattern for expression in expressions for pattern in _BY_PATTERN.findall(expression)}
    assert names, "no expression asks for any metric: was something renamed?"
    return Asked(frozenset(names), frozenset(patterns))
