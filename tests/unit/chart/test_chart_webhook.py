"""The admission webhook by choice: what it is asked about, how it is reached, and the rights that come with it."""

from typing import Any

import pytest

from ppojob_operator.admission import PATH
from ppojob_operator.settings import Settings
from tests.unit.chart.rendered import environment_of, only, pod_of, role_of

CONFIGURATION = "ValidatingWebhookConfiguration"


def webhook_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    [webhook] = only(objects, CONFIGURATION)["webhooks"]
    found: dict[str, Any] = webhook
    return found


def test_it_is_off_by_default_and_nothing_of_it_is_there(helm: Any) -> None:
    objects = helm.objects({})

    assert CONFIGURATION not in {manifest["kind"] for manifest in objects}
    assert Settings.from_environment(environment_of(objects)).webhook_configuration == ""
    assert "webhook" not in str(objects)


def test_the_api_server_reaches_every_replica_where_the_operator_listens(helm: Any) -> None:
    objects = helm.objects({"webhook.enabled": True})
    settings = Settings.from_environment(environment_of(objects))
    target = webhook_of(objects)["clientConfig"]["service"]
    service = only(objects, "Service")
    [port] = [port for port in service["spec"]["ports"] if port["port"] == target["port"]]
    [container] = pod_of(objects)["spec"]["containers"]
    listening = {each["name"]: each["containerPort"] for each in container["ports"]}

    assert (target["namespace"], target["name"]) == ("system", service["metadata"]["name"])
    assert target["path"] == PATH
    assert listening[port["targetPort"]] == settings.webhook_port
    assert settings.webhook_configuration == only(objects, CONFIGURATION)["metadata"]["name"]


def test_it_is_asked_about_new_and_changed_jobs_and_about_nothing_else(helm: Any) -> None:
    webhook = webhook_of(helm.objects({"webhook.enabled": True}))
    limited = webhook_of(helm.objects({"webhook.enabled": True, "watchNamespaces": ["team-a", "team-b"]}))

    [rule] = webhook["rules"]
    assert rule == {
        "apiGroups": ["ppojob.dev"],
        "apiVersions": ["v1alpha1"],
        "resources": ["ppojobs"],
        "operations": ["CREATE", "UPDATE"],
        "scope": "Namespaced",
    }
    assert webhook["sideEffects"] == "None"
    assert "namespaceSelector" not in webhook
    names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a", "team-b"]}
    assert limited["namespaceSelector"] == {"matchExpressions": [names]}


@pytest.mark.parametrize("policy", ["Ignore", "Fail"])
def test_whether_it_fails_open_or_closed_is_a_value(helm: Any, policy: str) -> None:
    values = {"webhook.enabled": True, "webhook.failurePolicy": policy, "webhook.timeoutSeconds": 30}

    webhook = webhook_of(helm.objects(values))

    assert (webhook["failurePolicy"], webhook["timeoutSeconds"]) == (policy, 30)


def test_a_pod_that_goes_answers_until_nobody_is_led_to_it(helm: Any) -> None:
    [container], [without] = (
        pod_of(helm.objects({"webhook.enabled": enabled}))["spec"]["containers"] for enabled in (True, False)
    )

    assert container["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}
    assert "lifecycle" not in without


def test_the_operators_entry_is_left_out_so_that_an_upgrade_leaves_it_alone(helm: Any) -> None:
    assert "caBundle" not in webhook_of(helm.objects({"webhook.enabled": True}))["clientConfig"]


def test_it_brings_the_right_to_change_this_one_configuration_and_to_read_classes(helm: Any) -> None:
    objects = helm.objects({"webhook.enabled": True, "watchNamespaces": ["rl-team"]})
    name = only(objects, CONFIGURATION)["metadata"]["name"]

    own, *others = role_of(objects, "system-ppojob-webhook")["rules"]

    assert own == {
        "apiGroups": ["admissionregistration.k8s.io"],
        "resources": ["validatingwebhookconfigurations"],
        "resourceNames": [name],
        "verbs": ["get", "patch"],
    }
    assert [(rule["resources"], rule["verbs"]) for rule in others] == [
        (["priorityclasses"], ["get"]),
        (["runtimeclasses"], ["get"]),
        (["localqueues", "workloadpriorityclasses"], ["get"]),
    ]


def test_a_guarded_operator_lets_the_api_server_in(helm: Any) -> None:
    guarded = helm.objects({"webhook.enabled": True, "networkPolicy.enabled": True})

    ingress = only(guarded, "NetworkPolicy")["spec"]["ingress"]

    assert ingress[2:] == [{"ports": [{"port": "webhook", "protocol": "TCP"}]}]


def test_who_may_ask_a_guarded_webhook_is_a_value(helm: Any) -> None:
    peers = [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    values = {"webhook.enabled": True, "networkPolicy.enabled": True, "networkPolicy.webhookFrom": peers}

    ingress = only(helm.objects(values), "NetworkPolicy")["spec"]["ingress"]

    assert ingress[2:] == [{"ports": [{"port": "webhook", "protocol": "TCP"}], "from": peers}]


def test_cert_manager_alone_makes_the_api_server_trust_its_certificate(helm: Any) -> None:
    objects = helm.objects({"webhook.enabled": True, "certificates.certManager.issuerRef": {"name": "ca"}})
    configuration, certificate = only(objects, CONFIGURATION), only(objects, "Certificate")

    place = f"{certificate['metadata']['namespace']}/{certificate['metadata']['name']}"
    assert configuration["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": place}
    assert not Settings.from_environment(environment_of(objects)).webhook_trust
    resources = [rule["resources"] for rule in role_of(objects, "system-ppojob-webhook")["rules"]]
    assert ["validatingwebhookconfigurations"] not in resources
    assert "annotations" not in only(helm.objects({"webhook.enabled": True}), CONFIGURATION)["metadata"]
