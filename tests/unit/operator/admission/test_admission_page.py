"""docs/admission.md quotes real messages: each one is produced here, and the page has no other."""

from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.spec_warnings import spec_warnings
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_operator.manifests.ray_cluster import template_problems
from ppojob_operator.plan import Claim
from ppojob_operator.reconcile.acceptance import Kind, Reference, absence, judge_claim, judge_references, named
from tests.unit.api.test_spec_warnings import among
from tests.unit.operator.reconcile.worlds import KEY, UID, spec

PAGE = Path("docs/admission.md").read_text()
CRITIC = {"name": "critic", "gpusPerNode": 1}


def parsed(**changes: Any) -> PPOJobSpec:
    return resolve(parse_spec(spec(**changes)))


def actors(**fields: Any) -> list[dict[str, Any]]:
    return [{"name": "actor", "gpusPerNode": 2, "nodes": 2, **fields}, CRITIC]


def test_the_page_quotes_what_is_said() -> None:
    host_network = parsed(head={"podTemplate": {"spec": {"hostNetwork": True}}})
    classes = {"podTemplate": {"spec": {"priorityClassName": "urgent", "runtimeClassName": "nvidia"}}}
    naming = parsed(
        head=classes,
        envFrom=[{"configMapRef": {"name": "settings"}}],
        serviceAccountName="reader",
        runPolicy={"queueName": "team-a", "queuePriorityClass": "soon"},
    )
    apart = parsed(pools=actors(spread="Required", nodeSelector={"a": "b"}))
    questionable = parsed(
        checkpoint={"everySteps": 0},
        image="trainer:latest",
        autoBalance={"enabled": True},
        reward={"function": {"module": "rewards", "timeoutSeconds": 1800}},
        algorithm={"policyLoss": "GSPO"},
    )
    experts = parsed(pools=actors(nodeSelector={"a": "b"}), actor={"miniBatchSize": 8, "expertParallelSize": 4})

    made = [
        *template_problems(host_network, KEY, UID),
        *judge_claim(parsed(), Claim("data", "Bound", ("ReadWriteOncePod",))).refusals,
        *judge_claim(parsed(), Claim("data", "Lost")).refusals,
        absence(Reference(Kind.TEMPLATE, "gpus", "spec.templateRef.name"), KEY.namespace),
        *judge_references(naming, KEY.namespace, dict.fromkeys(named(naming))).warnings,
        *spec_warnings(questionable),
        *spec_warnings(parsed(pools=actors())),
        *spec_warnings(parsed(pools=actors(podTemplate=among("H200", "A100")))),
        *spec_warnings(experts),
        *judge_claim(parsed(), Claim("data", "Bound", ("ReadWriteOnce",))).warnings,
        *judge_claim(apart, Claim("data", "Bound", ("ReadWriteOnce",))).warnings,
    ]

    assert [line for line in PAGE.splitlines() if line.startswith("spec.")] == list(map(str, made))
