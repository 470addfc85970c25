"""Monitors, dashboards and alerts: they find what they look at."""

import json
import re
from typing import Any

import pytest

from ppojob_api.v1alpha1 import constants
from tests.unit.chart.rendered import only


def test_the_service_monitor_finds_the_service(helm: Any) -> None:
    objects = helm.objects({"metrics.serviceMonitor.enabled": True, "metrics.serviceMonitor.labels": {"team": "rl"}})
    monitor, service = only(objects, "ServiceMonitor"), only(objects, "Service")

    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["honorLabels"], "else the namespace of a job becomes exported_namespace"
    assert monitor["metadata"]["labels"]["team"] == "rl"


@pytest.mark.parametrize(
    ("values", "where"),
    [({}, {"any": True}), ({"watchNamespaces": ["team-a", "team-b"]}, {"matchNames": ["team-a", "team-b"]})],
)
def test_the_pod_monitor_finds_the_ports_of_the_jobs_pods(
    helm: Any, values: dict[str, Any], where: dict[str, Any]
) -> None:
    monitored = {"metrics.podMonitor.enabled": True, "jobNetworkPolicy.metricsNamespace": "monitoring"}
    spec = only(helm.objects({**values, **monitored}), "PodMonitor")["spec"]

    assert spec["namespaceSelector"] == where
    assert spec["selector"]["matchExpressions"] == [{"key": constants.LABEL_JOB, "operator": "Exists"}]
    ports = {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
    assert ports <= {*constants.RAY_HEAD_PORTS, constants.METRICS_PORT_NAME}


def test_dashboards_are_grafanas_json_with_a_place_for_each_panel(helm: Any) -> None:
    values = {"metrics.dashboards.enabled": True, "metrics.dashboards.labels": {"grafana_dashboard": "yes"}}
    objects = [each for each in helm.objects(values) if each["kind"] == "ConfigMap"]

    assert {each["metadata"]["name"] for each in objects} == {
        "ppojob-dashboard-job",
        "ppojob-dashboard-jobs",
        "ppojob-dashboard-operator",
    }
    for manifest in objects:
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "yes"
        [(name, text)] = manifest["data"].items()
        dashboard = json.loads(text)
        assert name == f"{dashboard['uid']}.json"
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(ids) == len(set(ids))
        cells = [cell for panel in dashboard["panels"] for cell in cells_of(panel["gridPos"])]
        assert len(cells) == len(set(cells))
        variables = {variable["name"] for variable in dashboard["templating"]["list"]}
        assert set(re.findall(r"\$(\w+)", text)) - {"__all"} <= variables
        assert "SELECTED" not in text
        for panel in (panel for panel in dashboard["panels"] if panel["type"] != "row"):
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["type"] != "timeseries" or panel["fieldConfig"]["defaults"]["custom"]["axisLabel"]


def cells_of(place: dict[str, int]) -> list[tuple[int, int]]:
    """Return the cells of Grafana's grid that a panel takes, 24 in a row."""
    assert place["x"] + place["w"] <= 24
    columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return [(column, row) for column in columns for row in rows]


def test_alerts_are_about_this_release(helm: Any) -> None:
    rule = only(
        helm.objects({"metrics.alerts.enabled": True, "metrics.alerts.labels": {"team": "rl"}}), "PrometheusRule"
    )

    assert rule["metadata"]["labels"]["team"] == "rl"
    operator, jobs = rule["spec"]["groups"]
    for each in operator["rules"]:
        assert 'namespace="system",service="ppojob"' in each["expr"]
    for each in (*operator["rules"], *jobs["rules"]):
        assert "OPERATOR" not in each["expr"]
