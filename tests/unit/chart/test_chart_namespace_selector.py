"""`namespaceSelector`: the operator serves the namespaces whose labels match; what cannot be a selector is refused."""

import json
from typing import Any

import pytest

from ppojob_operator.settings import Settings
from tests.unit.chart.rendered import environment_of, identity, only, role_of

SELECTOR = {
    "matchLabels": {"ppojob.dev/enabled": "true"},
    "matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["guests"]}],
}
VALUES = {"namespaceSelector": SELECTOR, "webhook.enabled": True, "networkPolicy.enabled": True}


def test_the_operator_gets_the_selector_and_the_webhook_has_the_same(helm: Any) -> None:
    objects = helm.objects(VALUES)

    assert json.loads(environment_of(objects)["PPOJOB_NAMESPACE_SELECTOR"]) == SELECTOR
    settings = Settings.from_environment(environment_of(objects))
    assert str(settings.namespace_selector) == "ppojob.dev/enabled=true,team notin (guests)"
    assert only(objects, "ValidatingWebhookConfiguration")["webhooks"][0]["namespaceSelector"] == SELECTOR


def test_its_only_further_right_is_to_list_and_watch_namespaces(helm: Any) -> None:
    selecting, everywhere = (helm.objects(values) for values in ({"namespaceSelector": SELECTOR}, {}))
    rules, usual = (role_of(each, "system-ppojob")["rules"] for each in (selecting, everywhere))

    assert [rule for rule in rules if rule not in usual] == [
        {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["list", "watch"]}
    ]
    assert [rule for rule in usual if rule not in rules] == []
    assert set(map(identity, selecting)) == set(map(identity, everywhere))
    assert not any("namespaces" in rule["resources"] for each in everywhere for rule in each.get("rules", []))


def test_reports_of_jobs_arrive_from_a_namespace_that_has_lost_its_label(helm: Any) -> None:
    pods_of_jobs = {"matchExpressions": [{"key": "ppojob.dev/job", "operator": "Exists"}]}

    ingress = only(helm.objects(VALUES), "NetworkPolicy")["spec"]["ingress"]

    assert ingress[0]["from"] == [{"namespaceSelector": {}, "podSelector": pods_of_jobs}]


@pytest.mark.parametrize("selector", [{}, None, {"matchLabels": {}}, {"matchLabels": {}, "matchExpressions": []}])
def test_a_selector_without_a_requirement_is_none(helm: Any, selector: Any) -> None:
    assert helm.objects({"namespaceSelector": selector}) == helm.objects({})
    assert helm.objects({"namespaceSelector": selector, "watchNamespaces": ["a"]}) == helm.objects(
        {"watchNamespaces": ["a"]}
    )


def expression(**fields: Any) -> dict[str, Any]:
    return {"matchExpressions": [{"key": "team", "operator": "Exists"}, {"key": "team", **fields}]}


SECOND = "'/namespaceSelector/matchExpressions/1"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (expression(operator="Is"), f"{SECOND}/operator': value must be one of 'In', 'NotIn', 'Exists', 'DoesNot"),
        (expression(), f"{SECOND}': missing property 'operator'"),
        (expression(operator="In", values="rl"), f"{SECOND}/values': got string, want array"),
        (expression(operator="In", values=["r l"]), f"{SECOND}/values/0': 'r l' does not match pattern"),
        (expression(operator="In", value="rl"), f"{SECOND}': additional properties 'value' not allowed"),
        (expression(operator="Exists", key="a b"), f"{SECOND}/key': 'a b' does not match pattern"),
        ({"matchLabels": {"a": True}}, "'/namespaceSelector/matchLabels/a': got boolean, want string"),
        ({"matchLabels": {"-a": "b"}}, "'/namespaceSelector/matchLabels': additional properties '-a' not allowed"),
        ({"matchLabels": {"a": "-"}}, "'/namespaceSelector/matchLabels/a': '-' does not match pattern"),
        ({"labels": {}}, "'/namespaceSelector': additional properties 'labels' not allowed"),
        ([], "'/namespaceSelector': got array, want object"),
        (expression(operator="In"), "matchExpressions[1] is {\"key\":\"team\",\"operator\":\"In\"}: operator In needs "
         "values: name one at least, or use Exists or DoesNotExist"),
        (expression(operator="NotIn", values=[]), "operator NotIn needs values"),
        (expression(operator="Exists", values=["a"]), "operator Exists compares no values: remove them, or use In or "),
        (expression(operator="DoesNotExist", values=["a"]), "namespaceSelector.matchExpressions[1] is {"),
    ],
)  # fmt: skip
def test_what_is_no_selector_is_refused_with_its_path(helm: Any, values: Any, words: str) -> None:
    done = helm.template({"namespaceSelector": values})

    assert done.returncode != 0
    assert words in done.stderr


def test_a_selector_beside_a_list_is_refused_with_both_and_the_remedy(helm: Any) -> None:
    done = helm.template({"namespaceSelector": {"matchLabels": {"a": "b"}}, "watchNamespaces": ["rl-team"]})

    assert done.returncode != 0
    assert (
        'watchNamespaces is ["rl-team"] and namespaceSelector is {"matchLabels":{"a":"b"}}: name the namespaces or '
        "select them by their labels, and remove the other value (--set watchNamespaces=null or --set "
        "namespaceSelector=null)"
    ) in done.stderr
