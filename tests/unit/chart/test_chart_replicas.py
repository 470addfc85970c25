"""Several replicas: where they run, how they are replaced, and how they agree on one leader."""

from typing import Any

import pytest

from ppojob_operator.settings import Settings
from tests.unit.chart.rendered import environment_of, only, pod_of


def test_replicas_prefer_different_nodes_unless_the_values_say_otherwise(helm: Any) -> None:
    objects = helm.objects({})
    [term] = pod_of(objects)["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    mine = {"requiredDuringSchedulingIgnoredDuringExecution": []}

    labels = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels.items() <= pod_of(objects)["metadata"]["labels"].items()
    assert pod_of(helm.objects({"affinity.podAntiAffinity": mine}))["spec"]["affinity"] == {"podAntiAffinity": mine}


def test_one_replica_is_always_there(helm: Any) -> None:
    objects = helm.objects({})
    deployment, budget = only(objects, "Deployment"), only(objects, "PodDisruptionBudget")

    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]


@pytest.mark.parametrize("values", [{"replicas": 1}, {"replicas": 0}, {"podDisruptionBudget.enabled": False}])
def test_a_budget_is_made_only_where_it_lets_a_node_be_drained(helm: Any, values: dict[str, Any]) -> None:
    assert "PodDisruptionBudget" not in {manifest["kind"] for manifest in helm.objects(values)}


def test_the_times_of_the_election_reach_the_operator(helm: Any) -> None:
    times = {"leaseDurationSeconds": 30, "renewDeadlineSeconds": 20, "retryPeriodSeconds": 5}

    settings = Settings.from_environment(environment_of(helm.objects({"leaderElection": times})))

    assert (settings.lease_duration, settings.lease_renew_deadline, settings.lease_retry_period) == (30, 20, 5)


def test_times_with_which_two_would_lead_are_refused(helm: Any) -> None:
    done = helm.template({"leaderElection.renewDeadlineSeconds": 15})

    assert done.returncode != 0
    assert "renewDeadlineSeconds (15) < leaseDurationSeconds (15) must hold" in done.stderr
