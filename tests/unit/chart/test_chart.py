"""What the chart renders for each of its values, and which values it refuses."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppojob_api.v1alpha1.policy import POLICY_NAME
from ppojob_operator.settings import Settings
from tests.unit.chart.rendered import environment_of, identity, only, pod_of, role_of

PROJECT = Path(__file__).resolve().parents[3]
CHART = PROJECT / "charts" / "ppojob"
DEFINITION = PROJECT / "crds" / "ppojobs.ppojob.dev.yaml"
POLICY = PROJECT / "crds" / "ppojobs-policy.yaml"

SWITCHES: dict[str, dict[str, Any]] = {
    "two namespaces": {"watchNamespaces": ["team-a", "team-b"]},
    "no definition": {"crds.install": False},
    "definition that goes": {"crds.keep": False},
    "given certificates": {"certificates.existingSecret": "from-cert-manager"},
    "cert-manager": {"certificates.certManager.issuerRef": {"name": "ca", "kind": "ClusterIssuer"}},
    "given account": {"serviceAccount.create": False, "serviceAccount.name": "mine"},
    "monitored": {"metrics.serviceMonitor.enabled": True, "metrics.serviceMonitor.labels": {"team": "rl"}},
    "observed": {
        "metrics.podMonitor.enabled": True,
        "jobNetworkPolicy.metricsNamespace": "monitoring",
        "metrics.alerts.enabled": True,
        "metrics.dashboards.enabled": True,
        "logFormat": "JSON",
    },
    "asked": {"webhook.enabled": True},
    "not limited to owned objects": {"admissionPolicy.enabled": False},
    "guarded": {"networkPolicy.enabled": True},
    "jobs without a network policy": {"jobNetworkPolicy.enabled": False},
    "notifying": {"notifications.enabled": True, "notifications.existingSecret": "receiver"},
    "asleep": {"replicas": 0},
    "alone": {"replicas": 1},
}

EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry.example/ppojob-operator", "tag": "1.2.3", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "logLevel": "DEBUG",
    "resources": {"requests": {"cpu": 2, "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"a/b": "c"},
    "podLabels": {"team": "rl"},
    "serviceAccount.annotations": {"role": "x"},
}


def combinations() -> list[Any]:
    """Return no switch, each alone, each pair, and all at once: whatever two switches meet, they meet here."""
    chosen = [names for size in range(3) for names in itertools.combinations(SWITCHES, size)]
    return [pytest.param(list(names), id=", ".join(names) or "as it comes") for names in (*chosen, tuple(SWITCHES))]


def values_of(chosen: list[str]) -> dict[str, Any]:
    return {name: value for switch in chosen for name, value in SWITCHES[switch].items()}


def test_helm_finds_nothing_to_complain_about(helm: Any) -> None:
    done = helm.run("lint", "--strict", str(CHART), "--kube-version=1.34.0")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("chosen", combinations())
def test_every_combination_fits_together(helm: Any, chosen: list[str]) -> None:
    objects = helm.objects(values_of(chosen))
    names = {identity(manifest) for manifest in objects}

    assert len(names) == len(objects)
    for manifest in objects:
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == "ppojob"
        if manifest["kind"].endswith("RoleBinding"):
            kind, name = manifest["roleRef"]["kind"], manifest["roleRef"]["name"]
            assert (kind, manifest["metadata"].get("namespace", ""), name) in names
            account = "mine" if "given account" in chosen else "ppojob"
            assert manifest["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "system"}]
    pod = pod_of(objects)
    selector = only(objects, "Deployment")["spec"]["selector"]["matchLabels"].items()
    assert selector <= pod["metadata"]["labels"].items()
    assert only(objects, "Service")["spec"]["selector"].items() == selector
    secrets = {name for kind, _, name in names if kind == "Secret"}
    environment = environment_of(objects)
    assert secrets == {name for name in (environment.get("PPOJOB_CERTIFICATE_SECRET"),) if name}
    own = [rule for rule in role_of(objects, "ppojob-own")["rules"] if rule.get("resourceNames")]
    named = {(rule["resources"][0], name) for rule in own for name in rule["resourceNames"]}
    assert named == {
        *(("secrets", name) for name in secrets | {environment["PPOJOB_DASHBOARD_SECRET"]}),
        ("leases", environment["PPOJOB_LEASE_NAME"]),
    }


def test_all_values_at_once_reach_the_deployment(helm: Any) -> None:
    objects = helm.objects(EVERYTHING)
    pod = pod_of(objects)
    [container] = pod["spec"]["containers"]

    assert container["image"] == "registry.example/ppojob-operator:1.2.3"
    assert container["imagePullPolicy"] == "Always"
    assert container["resources"] == EVERYTHING["resources"]
    assert environment_of(objects)["PPOJOB_LOG_LEVEL"] == "DEBUG"
    for name in ("imagePullSecrets", "nodeSelector", "tolerations", "priorityClassName"):
        assert pod["spec"][name] == EVERYTHING[name]
    assert pod["spec"]["affinity"].items() >= EVERYTHING["affinity"].items()
    assert pod["metadata"]["annotations"] == {"a/b": "c"}
    assert pod["metadata"]["labels"]["team"] == "rl"
    assert only(objects, "ServiceAccount")["metadata"]["annotations"] == {"role": "x"}


@pytest.mark.parametrize("chosen", combinations()[: len(SWITCHES) + 1])
def test_the_operator_reads_the_environment_that_the_chart_gives_it(helm: Any, chosen: list[str]) -> None:
    objects = helm.objects(values_of(chosen))
    environment = environment_of(objects)

    settings = Settings.from_environment(environment)

    known = {f"PPOJOB_{field.upper()}" for field in Settings.model_fields}
    assert {name for name in environment if name.startswith("PPOJOB_")} <= known
    service = only(objects, "Service")
    assert settings.service_name == service["metadata"]["name"]
    ports = {port["name"]: port for port in service["spec"]["ports"]}
    assert settings.service_port == ports["https"]["port"]
    listening = {port["name"]: port["containerPort"] for port in pod_of(objects)["spec"]["containers"][0]["ports"]}
    webhook = {"webhook": settings.webhook_port} if "asked" in chosen else {}
    assert listening == {"https": settings.port, "http": settings.probe_port, **webhook}
    assert settings.watch_namespaces == (("team-a", "team-b") if "two namespaces" in chosen else ())


def test_the_pod_is_restricted_and_its_root_is_read_only(helm: Any) -> None:
    spec = pod_of(helm.objects({}))["spec"]

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 65532
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))


def test_the_probes_ask_for_progress(helm: Any) -> None:
    [container] = pod_of(helm.objects({}))["spec"]["containers"]

    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def definitions(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the CustomResourceDefinitions by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == "CustomResourceDefinition"}


def test_the_definitions_are_the_generated_ones_and_stay_by_choice(helm: Any) -> None:
    generated = {path.stem: yaml.safe_load(path.read_text()) for path in DEFINITION.parent.glob("*.ppojob.dev.yaml")}
    kept, going = (definitions(helm.objects({"crds.keep": keep})) for keep in (True, False))

    assert set(kept) == set(going) == set(generated)
    for name, definition in generated.items():
        assert kept[name]["spec"] == going[name]["spec"] == definition["spec"]
        assert kept[name]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert "annotations" not in going[name]["metadata"]


def test_the_policy_is_the_generated_one_and_always_goes(helm: Any) -> None:
    """A rollback may restore a CRD that this policy does not fit."""
    policy, binding = yaml.safe_load_all(POLICY.read_text())
    found = [named(helm.objects({"crds.keep": keep}), POLICY_NAME) for keep in (True, False)]

    for objects in found:
        assert [each["spec"] for each in objects] == [policy["spec"], binding["spec"]]
        assert all("annotations" not in each["metadata"] for each in objects)
        assert all(each["metadata"]["labels"]["app.kubernetes.io/name"] == "ppojob-operator" for each in objects)


def test_a_release_without_the_definition_has_no_policy_either(helm: Any) -> None:
    objects = helm.objects({"crds.install": False})

    assert "CustomResourceDefinition" not in [manifest["kind"] for manifest in objects]
    assert named(objects, POLICY_NAME) == []


def named(objects: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the policy and the binding of that name."""
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    return [each for each in objects if each["kind"] in kinds and each["metadata"]["name"] == name]


def test_given_certificates_are_mounted_and_none_are_made(helm: Any) -> None:
    objects = helm.objects({"certificates.existingSecret": "from-cert-manager"})
    spec = pod_of(objects)["spec"]

    assert {"name": "certificates", "secret": {"secretName": "from-cert-manager"}} in spec["volumes"]
    assert environment_of(objects)["PPOJOB_CERTIFICATE_FOLDER"] == spec["containers"][0]["volumeMounts"][1]["mountPath"]
    assert "Secret" not in {manifest["kind"] for manifest in objects}


def test_cert_manager_makes_the_certificate_of_the_service_by_the_issuer_that_is_named(helm: Any) -> None:
    issuer = {"name": "ca", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    objects = helm.objects({"certificates.certManager.issuerRef": issuer})
    certificate, spec = only(objects, "Certificate"), pod_of(objects)["spec"]
    names = Settings.from_environment({**environment_of(objects), "POD_NAMESPACE": "system"})

    assert certificate["apiVersion"] == "cert-manager.io/v1"
    assert certificate["spec"]["issuerRef"] == issuer
    assert certificate["spec"]["dnsNames"] == [
        f"{names.service_name}.system.svc{end}" for end in ("", ".cluster.local")
    ]
    assert certificate["spec"]["secretName"] == "ppojob-tls"
    assert {"name": "certificates", "secret": {"secretName": "ppojob-tls"}} in spec["volumes"]
    assert names.certificate_folder == spec["containers"][0]["volumeMounts"][1]["mountPath"]
    assert "Secret" not in {manifest["kind"] for manifest in objects}
    assert "Certificate" not in {manifest["kind"] for manifest in helm.objects({})}


def test_the_secret_that_cert_manager_fills_may_have_a_name_of_ones_own(helm: Any) -> None:
    given = {"certificates.certManager.issuerRef": {"name": "ca"}, "certificates.existingSecret": "mine"}
    objects = helm.objects(given)

    assert only(objects, "Certificate")["spec"]["secretName"] == "mine"
    assert {"name": "certificates", "secret": {"secretName": "mine"}} in pod_of(objects)["spec"]["volumes"]


def test_the_operators_certificates_come_empty_so_that_an_upgrade_leaves_them_alone(helm: Any) -> None:
    secret = only(helm.objects({}), "Secret")

    assert "data" not in secret
    assert "stringData" not in secret


def test_the_network_policy_lets_reports_and_probes_in(helm: Any) -> None:
    everywhere = only(helm.objects({"networkPolicy.enabled": True}), "NetworkPolicy")["spec"]
    values = {"networkPolicy.enabled": True, "watchNamespaces": ["team-a", "team-b"]}
    two = only(helm.objects(values), "NetworkPolicy")["spec"]

    assert everywhere["policyTypes"] == ["Ingress"]
    assert everywhere["ingress"][0]["from"] == [{"namespaceSelector": {}}]
    names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a", "team-b"]}
    assert two["ingress"][0]["from"] == [{"namespaceSelector": {"matchExpressions": [names]}}]
    assert two["ingress"][1] == {"ports": [{"port": "http", "protocol": "TCP"}]}


def test_jobs_get_a_network_policy_unless_it_is_off_and_the_right_to_create_it_comes_with_it(helm: Any) -> None:
    with_it = helm.objects({"jobNetworkPolicy.metricsNamespace": "monitoring"})
    without = helm.objects({"jobNetworkPolicy.enabled": False})
    settings = Settings.from_environment(environment_of(with_it))

    assert settings.job_network_policy
    assert settings.metrics_namespace == "monitoring"
    assert settings.labels_of_operator.items() <= pod_of(with_it)["metadata"]["labels"].items()
    assert not Settings.from_environment(environment_of(without)).job_network_policy
    rules = [[rule["resources"] for rule in role_of(each, "system-ppojob")["rules"]] for each in (with_it, without)]
    assert [["networkpolicies"] in resources for resources in rules] == [True, False]


def test_a_pod_monitor_that_the_network_policies_of_jobs_would_block_is_refused(helm: Any) -> None:
    done = helm.template({"metrics.podMonitor.enabled": True})

    assert done.returncode != 0
    assert "set jobNetworkPolicy.metricsNamespace to its namespace" in done.stderr
    assert helm.objects({"metrics.podMonitor.enabled": True, "jobNetworkPolicy.enabled": False})


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["team-a", "team-b"]}], ids=["everywhere", "limited"])
def test_helm_test_asks_with_the_operators_image_and_rights(helm: Any, values: dict[str, Any]) -> None:
    objects = helm.objects(values)
    test, pod = only(objects, "Pod"), pod_of(objects)["spec"]
    [container], [operators] = test["spec"]["containers"], pod["containers"]
    *_, script, probe, jobs, lease = container["command"]

    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert container["image"] == operators["image"]
    assert test["spec"]["serviceAccountName"] == pod["serviceAccountName"]
    assert script.strip() == (CHART / "files" / "installation_test.py").read_text().strip()
    compile(script, "installation_test.py", "exec")
    assert probe == f"http://{only(objects, 'Service')['metadata']['name']}.system.svc:8081/readyz"
    assert jobs.endswith("/namespaces/team-a/ppojobs" if values else "/v1alpha1/ppojobs")
    assert lease.endswith(f"/namespaces/system/leases/{environment_of(objects)['PPOJOB_LEASE_NAME']}")
    # Its labels are not those that the Service and the budget select.
    assert test["metadata"]["labels"]["app.kubernetes.io/name"] != "ppojob-operator"


def test_an_old_kubernetes_is_refused(helm: Any) -> None:
    done = helm.template({}, kubernetes="1.29.9")

    assert done.returncode != 0
    assert ">=1.30.0" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("replica", 1, "replica"),
        ("replicas", 6, "replicas"),
        ("replicas", "1", "replicas"),
        ("image.repository", "", "repository"),
        ("image.repository", None, "image"),
        ("image.digest", "sha256:0", "digest"),
        ("image.tag", "a b", "tag"),
        ("image.pullPolicy", "Sometimes", "pullPolicy"),
        ("watchNamespace", "a", "additional properties 'watchNamespace' not allowed"),
        ("watchNamespaces", "a", "'/watchNamespaces': got string, want array"),
        ("watchNamespaces", ["a", "b", "a"], "'/watchNamespaces': items at 0 and 2 are equal"),
        ("watchNamespaces", ["a", ""], "'/watchNamespaces/1'"),
        ("watchNamespaces", ["a,b"], "'/watchNamespaces/0'"),
        ("logLevel", "debug", "logLevel"),
        ("logFormat", "json", "logFormat"),
        ("metrics.podMonitor.port", 9464, "port"),
        ("metrics.alerts.rules", [], "rules"),
        ("metrics.dashboards.labels", {"grafana_dashboard": True}, "grafana_dashboard"),
        ("resources.request", {}, "request"),
        ("resources.limits", {"memory": "much"}, "limits"),
        ("tolerations", [{"effect": "Never"}], "effect"),
        ("tolerations", {}, "tolerations"),
        ("affinity.pods", {}, "pods"),
        ("nodeSelector", {"a": 1}, "nodeSelector"),
        ("podAnnotations", {"a": True}, "podAnnotations"),
        ("imagePullSecrets", ["registry"], "imagePullSecrets"),
        ("serviceAccount.create", "yes", "create"),
        ("crds.install", "no", "install"),
        ("crds.remove", True, "remove"),
        ("certificates.certManager", True, "certManager"),
        ("certificates.certManager.issuerRef", {"kind": "Issuer"}, "name"),
        ("certificates.certManager.issuerRef", {"name": ""}, "name"),
        ("certificates.certManager.issuerRef", {"name": "ca", "issuer": "x"}, "issuer"),
        ("networkPolicy.webhookFrom", [{"cidr": "10.0.0.1/32"}], "cidr"),
        ("certificates.existingSecret", "No_Name", "existingSecret"),
        ("metrics.enabled", True, "enabled"),
        ("metrics.serviceMonitor.interval", "often", "interval"),
        ("networkPolicy.enabled", "true", "enabled"),
        ("jobNetworkPolicy.egress", [], "egress"),
        ("jobNetworkPolicy.metricsNamespace", "a,b", "metricsNamespace"),
        ("autoscaling", {}, "autoscaling"),
        ("webhook.enabled", "true", "enabled"),
        ("webhook.failurePolicy", "Refuse", "failurePolicy"),
        ("webhook.timeoutSeconds", 31, "timeoutSeconds"),
        ("webhook.caBundle", "", "caBundle"),
        ("leaderElection.leaseDuration", "15s", "leaseDuration"),
        ("leaderElection.retryPeriodSeconds", 0, "retryPeriodSeconds"),
        ("podDisruptionBudget.minAvailable", 1, "minAvailable"),
        ("notifications.types", ["deleted"], "types"),
        ("notifications.types", [], "types"),
        ("notifications.timeoutSeconds", 61, "timeoutSeconds"),
        ("notifications.giveUpAfterSeconds", 59, "giveUpAfterSeconds"),
        ("notifications.clusterName", "a/b", "clusterName"),
        ("notifications.existingSecret", "No_Name", "existingSecret"),
        ("notifications.authorization", "Bearer x", "authorization"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Any, name: str, value: Any, words: str) -> None:
    done = helm.template({name: value})

    assert done.returncode != 0, done.stdout[:500]
    assert "values don't meet the specifications of the schema" in done.stderr
    assert words in done.stderr


def test_the_schema_knows_exactly_the_values_that_the_chart_documents() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    assert set(schema["properties"]) - {"global"} == set(values)
    for name, part in values.items():
        properties = schema["properties"][name].get("properties")
        if isinstance(part, dict) and part and properties:
            assert set(part) == set(properties), name
            assert schema["properties"][name]["additionalProperties"] is False
