"""The rights that the chart gives the operator."""

from pathlib import Path
from typing import Any

import yaml

from tests.unit.chart.rendered import identity, only, role_of

CHART = Path(__file__).resolve().parents[3] / "charts" / "ppojob"


def test_in_one_namespace_only_templates_tokens_and_the_policy_are_allowed_in_the_cluster(helm: Any) -> None:
    objects = helm.objects({"watchNamespace": "rl-team"})

    assert only(objects, "ClusterRole")["rules"] == [
        {"apiGroups": ["ppojob.dev"], "resources": ["clusterppojobtemplates"], "verbs": ["get"]},
        {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
        {
            "apiGroups": ["admissionregistration.k8s.io"],
            "resources": ["validatingadmissionpolicies", "validatingadmissionpolicybindings"],
            "resourceNames": ["ppojobs.ppojob.dev"],
            "verbs": ["get"],
        },
    ]
    places = {identity(manifest)[1:] for manifest in objects if manifest["kind"] == "Role"}
    assert places == {("rl-team", "ppojob"), ("system", "ppojob-own")}


def test_in_all_namespaces_only_rights_to_see_what_there_is_to_watch_and_who_else_does_are_added(helm: Any) -> None:
    everywhere = role_of(helm.objects({}), "system-ppojob")["rules"]
    one = role_of(helm.objects({"watchNamespace": "rl-team"}), "ppojob")["rules"]

    assert everywhere[: len(one)] == one
    *watched, lease = everywhere[len(one) :]
    assert {rule["resources"][0] for rule in watched} == {"customresourcedefinitions", "namespaces"}
    assert all(rule["verbs"] == ["get", "list", "watch"] for rule in watched)
    assert lease == {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": ["ppojob-leader"],
        "verbs": ["get"],
    }


def test_a_release_of_another_name_may_check_whether_one_of_its_or_the_usual_name_still_runs(helm: Any) -> None:
    done = helm.run("template", "team", str(CHART), "--namespace=system", "--kube-version=1.34.0")
    objects = [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]

    names = ["team-ppojob-leader", "ppojob-leader"]
    assert role_of(objects, "system-team-ppojob")["rules"][-1]["resourceNames"] == names


def test_no_role_has_a_wildcard_or_reads_the_secrets_of_users(helm: Any) -> None:
    for manifest in helm.objects({}):
        for rule in manifest.get("rules", []):
            assert "*" not in str(rule)
            if "secrets" in rule["resources"] and not rule.get("resourceNames"):
                assert rule["verbs"] == ["create"]
