"""The ValidatingAdmissionPolicy on the real API server: its types, its messages, and jobs older than a rule."""

import time
from typing import Any

import pytest

from tests.bad_specs import with_changes
from tests.integration.conftest import POLICY_DENIED, define, delete_policy
from tests.integration.crd.test_ppojob_definition import job


def test_the_policys_expressions_have_the_right_types(cluster: Any) -> None:
    """The API server compares them with the schema, and reports a field that does not exist."""
    deadline = time.monotonic() + 240
    while "typeChecking" not in (
        status := cluster.json("get", "validatingadmissionpolicy", "ppojobs.ppojob.dev").get("status", {})
    ):
        assert time.monotonic() < deadline, status
        time.sleep(0.5)

    assert status["typeChecking"] == {}


def test_the_policy_names_every_problem_with_field_value_and_remedy(kubectl: Any) -> None:
    done = kubectl.apply(
        with_changes(
            {
                ("spec", "actor", "miniBatchSize"): 7,
                ("spec", "placement", "critic"): "critics",
                ("spec", "pools", 0, "minNodes"): 2,
            }
        )
    )

    assert POLICY_DENIED in done.stderr
    for words in (
        "spec.actor.miniBatchSize: 7: actor.miniBatchSize must divide data.trainBatchSize",
        'spec.placement.critic: "critics": placement.critic must be the name of one of spec.pools',
        'spec.pools: ["actor"]: minNodes of a pool must not be above its nodes',
    ):
        assert words in done.stderr


def test_a_value_is_shown_as_a_quoted_text(kubectl: Any) -> None:
    done = kubectl.apply(with_changes({("spec", "data", "train"): {"huggingFace": {"path": 'a"b'}}}))

    assert r'spec.data.train.huggingFace.path: "a\"b": data.train.huggingFace.path must be' in done.stderr


@pytest.fixture
def stored_before_a_rule(kubectl: Any, cluster: Any) -> str:
    """The name of a job that the policy would refuse, stored while there was none."""
    delete_policy(cluster)
    try:
        kubectl.create(job("early", actor={"miniBatchSize": 7}))
    finally:
        define(cluster)
    return "early"


def test_a_job_that_was_stored_before_a_rule_can_be_managed(kubectl: Any, stored_before_a_rule: str) -> None:
    name = stored_before_a_rule
    patch = ("patch", "ppojob", name, "--type=merge")

    kubectl("label", "ppojob", name, "team=rl")
    kubectl(*patch, '--patch={"metadata": {"finalizers": ["ppojob.dev/test"]}}')
    kubectl(*patch, "--subresource=status", '--patch={"status": {"phase": "Running"}}')
    kubectl(*patch, '--patch={"spec": {"runPolicy": {"suspend": true}}}')
    worse = kubectl.run(*patch, '--patch={"spec": {"actor": {"miniBatchSize": 6}}}')
    corrected = kubectl.run(*patch, '--patch={"spec": {"actor": {"miniBatchSize": 8}}}')
    kubectl("delete", "ppojob", name, "--wait=false")
    kubectl(*patch, '--patch={"metadata": {"finalizers": null}}')

    assert "spec.actor.miniBatchSize: 6: " in worse.stderr
    assert (corrected.returncode, corrected.stderr) == (0, "")
