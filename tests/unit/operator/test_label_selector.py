"""A LabelSelector is validated with its path, and written as the query that the API server evaluates."""

import json
import re
from typing import Any

import pytest

from ppojob_operator.settings import Settings, SettingsError

VARIABLE = "PPOJOB_NAMESPACE_SELECTOR"


def read(selector: Any) -> Settings:
    return Settings.from_environment({VARIABLE: json.dumps(selector)})


def expression(operator: str, *values: str, key: str = "team") -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, **({"values": values} if values else {})}]}


@pytest.mark.parametrize(
    ("selector", "query"),
    [
        ({"matchLabels": {"ppojob.dev/enabled": "true"}}, "ppojob.dev/enabled=true"),
        ({"matchLabels": {"b": "2", "a": "1"}}, "a=1,b=2"),
        ({"matchLabels": {"empty": ""}}, "empty="),
        (expression("In", "rl"), "team in (rl)"),
        (expression("In", "rl", "nlp"), "team in (rl,nlp)"),
        (expression("NotIn", "rl", "nlp"), "team notin (rl,nlp)"),
        (expression("Exists"), "team"),
        (expression("DoesNotExist", key="example.com/private"), "!example.com/private"),
        ({"matchLabels": {"a": "1"}, **expression("Exists")}, "a=1,team"),
    ],
)
def test_a_selector_is_written_as_a_query(selector: Any, query: str) -> None:
    found = read(selector).namespace_selector

    assert str(found) == query
    assert found


@pytest.mark.parametrize("selector", [{}, {"matchLabels": {}}, {"matchExpressions": []}])
def test_a_selector_without_a_requirement_selects_nothing_in_particular(selector: Any) -> None:
    assert not read(selector).namespace_selector
    assert not Settings().namespace_selector


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        (expression("Is", "a"), ".matchExpressions[0].operator='Is': Input should be 'In', 'NotIn', 'Exists' or"),
        (expression("In"), "operator In needs values: name one at least, or use Exists or DoesNotExist"),
        (expression("NotIn"), ".matchExpressions[0]={'key': 'team', 'operator': 'NotIn'}: "),
        (expression("Exists", "a"), "operator Exists compares no values: remove them, or use In or NotIn"),
        (expression("DoesNotExist", "a"), "operator DoesNotExist compares no values"),
        (
            expression("Exists", key="a b"),
            ".matchExpressions[0].key='a b': Value error, not the name of a label: write",
        ),
        (expression("Exists", key="UPPER.example/a"), ".matchExpressions[0].key='UPPER.example/a'"),
        (expression("Exists", key="a..b/c"), ".matchExpressions[0].key='a..b/c'"),
        (expression("Exists", key=f"{'a' * 254}/b"), ".matchExpressions[0].key="),
        (expression("Exists", key="a" * 64), ".matchExpressions[0].key="),
        (expression("In", "ok", "-no"), ".matchExpressions[0].values[1]='-no': Value error, not the value of a label"),
        ({"matchExpressions": [{"operator": "Exists"}]}, ".matchExpressions[0].key="),
        ({"matchLabels": {"a": True}}, ".matchLabels.a=True: Value error, not the value of a label: write a string"),
        ({"matchLabels": {"a": "b" * 64}}, ".matchLabels.a="),
        ({"matchLabels": {"a": "b,c"}}, ".matchLabels.a='b,c'"),
        ({"matchLabels": {"-a": "b"}}, ".matchLabels.-a='-a': Value error, not the name of a label: write a name"),
        ({"labels": {"a": "b"}}, ".labels={'a': 'b'}: Extra inputs are not permitted"),
        ([], "=[]: Input should be a valid dictionary"),
    ],
)
def test_an_invalid_selector_is_refused_with_path_value_and_remedy(selector: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)) as caught:
        read(selector)
    assert str(caught.value).startswith(VARIABLE)


def test_a_selector_that_is_not_json_is_refused_with_an_example() -> None:
    with pytest.raises(SettingsError, match=r'write a LabelSelector, such as \{"matchLabels": \{"ppojob\.dev/'):
        Settings.from_environment({VARIABLE: "team=rl"})


def test_a_selector_and_a_list_are_refused_together() -> None:
    with pytest.raises(
        SettingsError, match=r"PPOJOB_WATCH_NAMESPACES=a,b and PPOJOB_NAMESPACE_SELECTOR=team in \(rl\)"
    ):
        Settings.from_environment({VARIABLE: json.dumps(expression("In", "rl")), "PPOJOB_WATCH_NAMESPACES": "a,b"})
