"""The generated policy: what it matches, and what its messages show. tests/integration/crd has it evaluated."""

import re

import pytest

from ppojob_api.v1alpha1.base import Rule
from ppojob_api.v1alpha1.fixed import FIXED_RULES
from ppojob_api.v1alpha1.policy import admission_policy
from ppojob_api.v1alpha1.rules import SPEC_RULES

POLICY, BINDING = admission_policy()
VARIABLES: dict[str, str] = {each["name"]: each["expression"] for each in POLICY["spec"]["variables"]}
RULES = [*SPEC_RULES, *FIXED_RULES]


def line_of(rule: Rule) -> str:
    """Return the line of the policy that has a rule."""
    [line] = [
        line
        for text in VARIABLES.values()
        for line in text.splitlines()
        if line.startswith(f"  ({rule.rule}) ? ") and f'"spec{rule.field_path}"' in line
    ]
    return line


def test_writes_of_the_status_and_edits_outside_the_spec_evaluate_nothing() -> None:
    [matched] = POLICY["spec"]["matchConstraints"]["resourceRules"]
    [condition] = POLICY["spec"]["matchConditions"]

    assert (matched["resources"], matched["operations"]) == (["ppojobs"], ["CREATE", "UPDATE"])
    assert condition["expression"] == "oldObject == null || object.spec != oldObject.spec"


def test_the_binding_denies_by_this_policy() -> None:
    assert BINDING["spec"] == {"policyName": POLICY["metadata"]["name"], "validationActions": ["Deny"]}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.field_path} {rule.message[:40]}")
def test_each_rule_is_in_the_policy_with_field_and_remedy(rule: Rule) -> None:
    assert rule.field_path.startswith(".")
    assert rule.message in line_of(rule).replace('\\"', '"')


def value_of(field_path: str) -> str:
    """Return in CEL what the policy shows of a field."""
    [rule, *_] = [rule for rule in RULES if rule.field_path == field_path]
    found = re.search(r'"value": (.*), "message": ', line_of(rule))
    assert found is not None
    return found[1]


def test_a_text_is_quoted_and_a_number_is_not() -> None:
    assert "strings.quote(value)" in value_of(".placement.critic")
    assert '"%s".format([value])' in value_of(".actor.miniBatchSize")


def test_an_object_is_not_shown_because_it_may_hold_passwords() -> None:
    assert value_of(".reward") == '""'


def test_of_a_list_the_items_at_fault_are_shown() -> None:
    assert "filter(w, !self.pools.exists(p, p.name == w.pool))" in value_of(".workers")


SECTIONS = {rule.field_path.split(".")[1] for rule in SPEC_RULES}


@pytest.mark.parametrize(("name", "index"), [("introduced", 0), ("before", 1)])
def test_every_section_is_in_the_message_unless_the_stored_spec_has_the_problem(name: str, index: int) -> None:
    assert set(re.findall(rf"variables\.(\w+)\[{index}\]", VARIABLES[name])) == SECTIONS


def test_fixed_fields_are_those_of_accepted_jobs() -> None:
    assert VARIABLES["fixed"].startswith("!variables.isAccepted ? [] : [")
    assert VARIABLES["introduced"].endswith(" + variables.fixed + variables.ungoverned")


def test_rules_that_read_fields_of_a_template_wait_for_the_completed_spec() -> None:
    always, waiting = VARIABLES["rollout"].split("(!has(self.templateRef) && has(self.pools) && ")

    assert "self.rollout.samplesPerPrompt > 1" in always
    assert "self.pools" not in always
    assert "p.gpusPerNode % self.rollout.tensorParallelSize == 0" in waiting
    assert waiting.endswith(" : []))")


def test_a_namespace_may_require_a_template() -> None:
    assert VARIABLES["requiredTemplate"] == (
        'namespaceObject.metadata.?labels[?"ppojob.dev/require-template"].orValue("")'
    )
    assert VARIABLES["ungoverned"].startswith('variables.requiredTemplate != "" && ')
