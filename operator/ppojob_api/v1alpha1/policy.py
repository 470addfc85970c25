"""The ValidatingAdmissionPolicy of PPOJob: rules on the whole spec, and fields that are fixed once a job is accepted.

`generate.py` writes it; the operator compares it with the one in the cluster. In the CRD's schema, the API server would
evaluate these rules at each write of the status too. The policy matches `ppojobs` and not `ppojobs/status`, only if the
spec changes, and refuses only problems that the stored spec does not have. All of them are in one message, because the
API server returns only the first validation that fails.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.base import Rule
from ppojob_api.v1alpha1.fixed import FIXED_RULES
from ppojob_api.v1alpha1.rules import SPEC_RULES
from ppojob_api.v1alpha1.schema import structural
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.template_reference import TemplateKind
from ppojob_api.v1alpha1.template_rules import HAS_ALL
from ppojob_api.v1alpha1.templates import TEMPLATED

POLICY_NAME = f"{constants.PLURAL}.{constants.GROUP}"
"""Name of the policy and of its binding."""
_API_VERSION = "admissionregistration.k8s.io/v1"
_MAX_VALUE = 200
_MAX_MESSAGE = 4000
"""The API server drops messages above 5 KiB."""
_SCALARS = ("string", "integer", "number", "boolean")


def admission_policy() -> list[dict[str, Any]]:
    """Return the ValidatingAdmissionPolicy and its binding."""
    metadata = {"name": POLICY_NAME}
    binding = {"policyName": POLICY_NAME, "validationActions": ["Deny"]}
    return [
        {"apiVersion": _API_VERSION, "kind": "ValidatingAdmissionPolicy", "metadata": metadata, "spec": _policy()},
        {"apiVersion": _API_VERSION, "kind": "ValidatingAdmissionPolicyBinding", "metadata": metadata, "spec": binding},
    ]


_REQUIREMENT = json.dumps(constants.LABEL_REQUIRE_TEMPLATE)
_UNGOVERNED = (
    'variables.requiredTemplate != "" && (oldObject == null || has(oldObject.spec.templateRef)) && '
    "(!has(object.spec.templateRef) || (variables.requiredTemplate == "
    f'"{TemplateKind.CLUSTER}" && object.spec.templateRef.kind != "{TemplateKind.CLUSTER}"))'
)
"""In CEL: whether a job lacks the template that its namespace requires. Jobs that had none before stay."""


def _policy() -> dict[str, Any]:
    served = {"apiGroups": [constants.GROUP], "apiVersions": [constants.VERSION], "resources": [constants.PLURAL]}
    return {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [{**served, "operations": ["CREATE", "UPDATE"], "scope": "Namespaced"}]},
        "matchConditions": [
            {"name": "spec-changes", "expression": "oldObject == null || object.spec != oldObject.spec"}
        ],
        "variables": [{"name": name, "expression": expression} for name, expression in _variables().items()],
        "validations": [
            {
                "expression": "size(variables.problems) == 0",
                "message": "the spec breaks rules that are too long to show: `ppojob validate` lists them",
                "messageExpression": _shortened('variables.problems.join("; ")', _MAX_MESSAGE),
                "reason": "Invalid",
            }
        ],
    }


def _variables() -> dict[str, str]:
    """Return the variables by name. That of a section is the list of its problems for each of `specs`."""
    sections: dict[str, list[Rule]] = {}
    for rule in SPEC_RULES:
        sections.setdefault(rule.field_path.split(".")[1], []).append(rule)
    accepted = 'oldObject.?status.?conditions.orValue([]).exists(c, c.type == "Accepted" && c.status == "True")'
    now, before = (" + ".join(f"variables.{name}[{index}]" for name in sections) for index in (0, 1))
    shown = f'(problem.value == "" ? "" : {_shortened("problem.value", _MAX_VALUE)} + ": ")'
    return {
        "specs": "oldObject == null ? [object.spec] : [object.spec, oldObject.spec]",
        **{name: f"variables.specs.map(self, {_section(rules)})" for name, rules in sections.items()},
        "isAccepted": f"oldObject != null && {accepted}",
        "fixed": (
            "!variables.isAccepted ? [] : "
            f"[object.spec].map(self, [oldObject.spec].map(oldSelf, {_problems(FIXED_RULES)})[0])[0]"
        ),
        # A job that was stored before a rule existed can still be suspended.
        "before": f"oldObject == null ? [] : {before}",
        "requiredTemplate": f'namespaceObject.metadata.?labels[?{_REQUIREMENT}].orValue("")',
        "ungoverned": f"{_UNGOVERNED} ? [{{{_ungoverned_problem()}}}] : []",
        "introduced": (
            f"({now}).filter(problem, !(problem in variables.before)) + variables.fixed + variables.ungoverned"
        ),
        "problems": f'variables.introduced.map(problem, problem.field + ": " + {shown} + problem.message)',
    }


def _ungoverned_problem() -> str:
    message = (
        f"this namespace requires a template (its label {constants.LABEL_REQUIRE_TEMPLATE}): name one, of kind "
        f"{TemplateKind.CLUSTER} if the label says so"
    )
    return f'"field": "spec.templateRef", "value": "", "message": {_text(message)}'


def _section(rules: Sequence[Rule]) -> str:
    """Return in CEL the list of the problems of a section of `self`.

    Rules that read fields of a template wait for the completed spec, which the webhook and the operator check.
    """
    waiting = [rule for rule in rules if _reads_templated(rule)]
    always = [rule for rule in rules if rule not in waiting]
    if not waiting:
        return _problems(always)
    complete = f"({HAS_ALL} ? {_problems(waiting)} : [])"
    return f"{_problems(always)} + {complete}" if always else complete


def _reads_templated(rule: Rule) -> bool:
    named = set(re.findall(r"\bself\.\??(\w+)", rule.rule))
    return bool(named & set(TEMPLATED)) and "templateRef" not in named


def _problems(rules: Iterable[Rule]) -> str:
    """Return in CEL the list of the problems of `self`, one line for each rule."""
    return "[\n" + ",\n".join(f"  {_problem(rule)}" for rule in rules) + "\n].filter(problem, size(problem) > 0)"


def _problem(rule: Rule) -> str:
    found = {"field": f'"spec{rule.field_path}"', "value": _value(rule), "message": _text(rule.message)}
    entries = ", ".join(f'"{name}": {expression}' for name, expression in found.items())
    return f"({rule.rule}) ? {{}} : {{{entries}}}"


def _shortened(text: str, limit: int) -> str:
    return f'(size({text}) > {limit} ? {text}.substring(0, {limit - 3}) + "..." : {text})'


def _value(rule: Rule) -> str:
    """Return in CEL the text of the value to show: that of a scalar or of a list of scalars."""
    if rule.value:
        return f'"%s".format([{rule.value}])'
    names = rule.field_path.split(".")[1:]
    node = _spec_schema()
    for name in names:
        node = node["properties"][name]
    kind = node.get("items", node).get("type")
    if kind not in _SCALARS:
        # Objects are long, and may hold passwords.
        return '""'
    optional = "self" + "".join(f".?{name}" for name in names)
    shown = "strings.quote(value)" if kind == "string" and "items" not in node else '"%s".format([value])'
    return f'{optional}.optMap(value, {shown}).orValue("")'


@cache
def _spec_schema() -> dict[str, Any]:
    return structural(PPOJobSpec)


def _text(message: str) -> str:
    return json.dumps(message, ensure_ascii=False)
