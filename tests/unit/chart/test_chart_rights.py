"""The rights that the chart gives the operator."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.chart.rendered import identity, only, role_of

CHART = Path(__file__).resolve().parents[3] / "charts" / "ppojob"


def test_a_limited_operator_may_only_use_templates_tokens_and_the_policy_in_the_cluster(helm: Any) -> None:
    objects = helm.objects({"watchNamespaces": ["team-a", "team-b"]})

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
    assert places == {("team-a", "ppojob"), ("team-b", "ppojob"), ("system", "ppojob-own")}


def test_each_watched_namespace_has_the_same_role_and_binds_it_to_the_operators_account(helm: Any) -> None:
    found = {identity(each): each for each in helm.objects({"watchNamespaces": ["team-a", "team-b"]})}

    roles, bindings = (
        [found[kind, namespace, "ppojob"] for namespace in ("team-a", "team-b")] for kind in ("Role", "RoleBinding")
    )
    assert roles[0]["rules"] == roles[1]["rules"]
    for binding in bindings:
        assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "ppojob"}
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "ppojob", "namespace": "system"}]


def test_the_list_is_given_to_helm_in_braces_and_removed_by_null(helm: Any) -> None:
    def role_namespaces(*more: str) -> list[str]:
        done = helm.run("template", "ppojob", str(CHART), "--kube-version=1.34.0", *more)
        assert done.returncode == 0, done.stderr
        roles = [each for each in yaml.safe_load_all(done.stdout) if each and identity(each)[::2] == ("Role", "ppojob")]
        return [each["metadata"]["namespace"] for each in roles]

    assert role_namespaces("--set=watchNamespaces={123-team}") == ["123-team"]
    assert role_namespaces("--set=watchNamespaces={team-a,team-b}") == ["team-a", "team-b"]
    assert role_namespaces("--set=watchNamespaces={team-a}", "--set=watchNamespaces=null") == []
    # A name of digits only is a number for --set.
    assert role_namespaces('--set-json=watchNamespaces=["123"]') == ["123"]


def test_in_all_namespaces_only_rights_to_see_what_there_is_to_watch_and_who_else_does_are_added(helm: Any) -> None:
    everywhere = role_of(helm.objects({}), "system-ppojob")["rules"]
    limited = role_of(helm.objects({"watchNamespaces": ["rl-team"]}), "ppojob")["rules"]

    assert everywhere[: len(limited)] == limited
    *watched, lease = everywhere[len(limited) :]
    assert [(rule["resources"], rule["verbs"]) for rule in watched] == [
        (["customresourcedefinitions"], ["get", "list", "watch"])
    ]
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


@pytest.mark.parametrize(("is_limited", "verbs"), [(True, ["create", "delete"]), (False, ["create"])])
def test_secrets_are_deleted_only_where_the_policy_limits_that_to_those_of_jobs(
    helm: Any, is_limited: bool, verbs: list[str]
) -> None:
    objects = helm.objects({"admissionPolicy": {"enabled": is_limited}})

    rules = role_of(objects, "system-ppojob")["rules"]
    assert [rule["verbs"] for rule in rules if rule["resources"] == ["secrets"]] == [verbs]


def test_no_role_has_a_wildcard_or_reads_the_secrets_of_users(helm: Any) -> None:
    for manifest in helm.objects({}):
        for rule in manifest.get("rules", []):
            assert "*" not in str(rule)
            if "secrets" in rule["resources"] and not rule.get("resourceNames"):
                assert set(rule["verbs"]) <= {"create", "delete"}
