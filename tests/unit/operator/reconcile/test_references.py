"""Objects that a spec names: which ones are checked, and the messages about them."""

from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_operator.plan import Claim
from ppojob_operator.reading import read_claim
from ppojob_operator.reconcile.acceptance import Kind, Reference, claim_of, judge_claim, judge_references, named
from tests.unit.operator.reconcile.worlds import spec

CLASSES = {"priorityClassName": "urgent", "runtimeClassName": "nvidia"}
APART = [{"name": "actor", "gpusPerNode": 2, "nodes": 2, "spread": "Required"}, {"name": "critic", "gpusPerNode": 2}]


def parsed(**changes: Any) -> PPOJobSpec:
    return resolve(parse_spec(spec(**changes)))


def places(wanted: list[Reference]) -> list[tuple[str, str, str]]:
    return [(reference.kind.value, reference.name, reference.path) for reference in wanted]


def test_every_object_is_read_once_for_the_first_field_that_names_it() -> None:
    pools = [{**pool, "podTemplate": {"spec": CLASSES}} for pool in spec()["pools"]]
    source = {"configMapKeyRef": {"name": "settings", "key": "a"}}
    job = parsed(
        head={"podTemplate": {"spec": {"priorityClassName": "calm"}}},
        pools=pools,
        env=[{"name": "A", "valueFrom": source}, {"name": "B", "value": "1"}],
        envFrom=[{"configMapRef": {"name": "more"}}, {"configMapRef": {"name": "settings"}}],
        serviceAccountName="reader",
        runPolicy={"queueName": "team-a", "queuePriorityClass": "soon"},
    )

    assert places(named(job)) == [
        ("PersistentVolumeClaim", "data", "spec.storage.claimName"),
        ("ServiceAccount", "reader", "spec.serviceAccountName"),
        ("LocalQueue", "team-a", "spec.runPolicy.queueName"),
        ("WorkloadPriorityClass", "soon", "spec.runPolicy.queuePriorityClass"),
        ("ConfigMap", "settings", "spec.env[0].valueFrom.configMapKeyRef.name"),
        ("ConfigMap", "more", "spec.envFrom[0].configMapRef.name"),
        ("PriorityClass", "calm", "spec.head.podTemplate.spec.priorityClassName"),
        ("PriorityClass", "urgent", "spec.pools[0].podTemplate.spec.priorityClassName"),
        ("RuntimeClass", "nvidia", "spec.pools[0].podTemplate.spec.runtimeClassName"),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"envFrom": [{"configMapRef": {"name": "more", "optional": True}}]},
        {"envFrom": [{"secretRef": {"name": "token"}}]},
        {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "token", "key": "a"}}}]},
        {"envFrom": [{"configMapRef": "more"}]},
        {"head": {"podTemplate": {"spec": {"priorityClassName": 5}}}},
        {"head": {"podTemplate": {"spec": []}}},
    ],
    ids=["optional", "Secret", "key of a Secret", "no object", "no name", "no pod"],
)
def test_optional_and_unreadable_objects_are_not_read(changes: dict[str, Any]) -> None:
    assert places(named(parsed(**changes))) == places([claim_of(parsed())])


def test_a_missing_object_is_a_warning_because_it_may_be_created_a_moment_later() -> None:
    wanted = [
        claim_of(parsed()),
        Reference(Kind.RUNTIME_CLASS, "nvidia", "spec.head.podTemplate.spec.runtimeClassName"),
    ]

    verdict = judge_references(parsed(), "rl-team", dict.fromkeys(wanted))

    assert verdict.refusals == ()
    assert list(map(str, verdict.warnings)) == [
        "spec.storage.claimName: 'data': there is no such claim in namespace rl-team: create it, or name another",
        "spec.head.podTemplate.spec.runtimeClassName: 'nvidia': there is no such RuntimeClass: create it, or name "
        "another",
    ]


def test_existing_objects_give_no_warning() -> None:
    claim = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteMany"]}}
    reference = Reference(Kind.PRIORITY_CLASS, "urgent", "spec.x")

    verdict = judge_references(
        parsed(), "rl-team", {claim_of(parsed()): claim, reference: {"metadata": {"name": "urgent"}}}
    )

    assert (verdict.refusals, verdict.warnings) == ((), ())


@pytest.mark.parametrize(
    ("modes", "changes", "refused", "words"),
    [
        (("ReadWriteMany",), {}, False, ""),
        (("ReadWriteOnce", "ReadWriteMany"), {"pools": APART}, False, ""),
        ((), {}, False, ""),
        (("ReadWriteOnce",), {}, False, "the claim is ReadWriteOnce: unless all 3 pods are on one host, some wait"),
        (
            ("ReadWriteOnce",),
            {"pools": APART},
            False,
            "spread: Required puts the pods of pool actor on many hosts: use",
        ),
        (("ReadWriteOncePod",), {}, True, "the claim is ReadWriteOncePod, and all pods write to it: use one that is"),
        (("ReadOnlyMany",), {}, False, "the claim is ReadOnlyMany, and all pods write to it: use one that is"),
    ],
)
def test_a_claim_is_refused_only_where_the_job_could_never_run_with_it(
    modes: tuple[str, ...], changes: dict[str, Any], refused: bool, words: str
) -> None:
    verdict = judge_claim(parsed(**changes), Claim("data", "Bound", modes))

    said = verdict.refusals if refused else verdict.warnings
    assert len(verdict.refusals) + len(verdict.warnings) == bool(words)
    assert all(words in str(field) for field in said)
    assert len(said) == bool(words)


def test_a_claim_that_has_lost_its_volume_is_refused() -> None:
    assert "has lost its volume" in str(judge_claim(parsed(), Claim("data", "Lost")).refusals[0])


def test_a_claim_has_the_access_modes_of_its_volume() -> None:
    raw = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}

    assert read_claim(raw) == Claim("data", "Pending", ("ReadWriteOnce",))
    bound = {**raw, "status": {"phase": "Bound", "accessModes": ["ReadWriteOnce", "ReadWriteMany"]}}
    assert read_claim(bound) == Claim("data", "Bound", ("ReadWriteOnce", "ReadWriteMany"))
