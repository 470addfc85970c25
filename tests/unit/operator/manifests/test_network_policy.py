"""Who may reach the pods of a job, where its network is guarded."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_operator.manifests.network_policy import network_policy
from ppojob_operator.manifests.pod import head_template, pool_template
from ppojob_operator.plan import JobKey, JobNetwork
from tests.unit.operator.reconcile.worlds import spec as spec_of

KEY = JobKey("rl-team", "arithmetic")
OPERATOR = {"app.kubernetes.io/name": "ppojob-operator"}


def spec(**changes: Any) -> PPOJobSpec:
    return resolve(parse_spec(spec_of(**changes)))


def ingress(spec: PPOJobSpec, metrics_namespace: str = "") -> list[dict[str, Any]]:
    policy = network_policy(spec, KEY, "uid", JobNetwork("ppojob-system", OPERATOR, metrics_namespace))
    assert policy is not None
    rules: list[dict[str, Any]] = policy["spec"]["ingress"]
    return rules


def test_it_selects_every_pod_of_the_job_and_no_other() -> None:
    resolved = spec()
    policy = network_policy(resolved, KEY, "uid", JobNetwork("ppojob-system", OPERATOR))
    assert policy is not None
    selected = policy["spec"]["podSelector"]["matchLabels"]
    templates = [head_template(resolved, KEY, "uid"), *(pool_template(resolved, p, KEY, "c") for p in resolved.pools)]

    assert selected == {"ppojob.dev/job": "arithmetic"}
    assert all(selected.items() <= template["metadata"]["labels"].items() for template in templates)
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_the_jobs_own_pods_reach_each_other_and_the_operator_the_dashboard_alone() -> None:
    own, operator = ingress(spec())

    assert own == {"from": [{"podSelector": {"matchLabels": {"ppojob.dev/job": "arithmetic"}}}]}
    assert operator["ports"] == [{"port": 8265, "protocol": "TCP"}]
    # One entry with both selectors: pods with these labels in that namespace, not either.
    assert operator["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ppojob-system"}},
            "podSelector": {"matchLabels": OPERATOR},
        }
    ]


@pytest.mark.parametrize(("port", "ports"), [(9464, [8080, 9464]), (0, [8080])])
def test_metrics_are_scraped_from_the_namespace_that_is_named(port: int, ports: list[int]) -> None:
    scraper = ingress(spec(telemetry={"prometheusPort": port}), "monitoring")[-1]

    assert [each["port"] for each in scraper["ports"]] == ports
    assert scraper["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}


def test_a_job_on_the_hosts_network_has_none() -> None:
    pools = [
        {"name": "actor", "gpusPerNode": 2, "network": {"hostNetwork": True}},
        {"name": "critic", "gpusPerNode": 1},
    ]

    assert network_policy(spec(pools=pools), KEY, "uid", JobNetwork("ppojob-system", OPERATOR)) is None
