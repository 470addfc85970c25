"""Templates on the real API server: their CRDs, what is refused in them, and jobs that are complete only with one."""

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import LABEL_REQUIRE_TEMPLATE
from ppojob_api.v1alpha1.templates import parse_with, pinned, reference
from tests.bad_templates import BAD_TEMPLATES, JOB, TEMPLATE, BadTemplate, changed
from tests.examples import FOLDER
from tests.good_spec import GONE, GOOD
from tests.integration.conftest import POLICY_DENIED, Kubectl

CRDS = ("ppojobtemplates.ppojob.dev", "clusterppojobtemplates.ppojob.dev")
_LIMIT_SECONDS = 240
# Where kubectl or the API server names the place in other words than we do.
OTHER_WORDS = {
    "a number as text": "spec.template.runPolicy.backoffLimit: Invalid value",
    "a pool without a name": "spec.template.pools[0].name: Required value",
}


def named(manifest: dict[str, Any], name: str, **spec: Any) -> dict[str, Any]:
    """Return a manifest with another name, and fields of its spec replaced."""
    return {**manifest, "metadata": {"name": name}, "spec": {**manifest["spec"], **spec}}


@pytest.mark.parametrize("crd", CRDS)
def test_the_api_server_takes_the_definitions_as_they_are(cluster: Kubectl, crd: str) -> None:
    conditions = cluster.json("get", "crd", crd)["status"]["conditions"]

    assert {c["type"]: c["status"] for c in conditions} == {"NamesAccepted": "True", "Established": "True"}


def test_the_example_is_taken_without_a_warning(kubectl: Kubectl) -> None:
    path = FOLDER / "16-template" / "template.yaml"
    done = kubectl.run("apply", "--validate=strict", "--dry-run=server", f"--filename={path}")

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("bad", BAD_TEMPLATES, ids=lambda bad: bad.name)
def test_kubectl_apply_refuses_a_bad_template_and_names_the_field(kubectl: Kubectl, bad: BadTemplate) -> None:
    done = kubectl.apply(bad.manifest())

    assert (done.returncode != 0) == bad.server_refuses, done.stdout
    assert OTHER_WORDS.get(bad.name, bad.path) in done.stderr


def test_nothing_is_added_to_a_template_that_would_take_precedence(kubectl: Kubectl) -> None:
    stored = kubectl.create(named(TEMPLATE, "bare", template={"runPolicy": {"backoffLimit": 3}, "head": {}}))["spec"]

    assert stored == {**TEMPLATE["spec"], "template": {"runPolicy": {"backoffLimit": 3}, "head": {}}}


def test_a_job_without_what_its_template_has_is_taken_and_stored_without_its_defaults(kubectl: Kubectl) -> None:
    stored = kubectl.create(named(JOB, "incomplete", pools=[{"name": "actor"}, {"name": "critic"}]))["spec"]

    assert stored["templateRef"] == {"kind": "PPOJobTemplate", "name": "gpus"}
    assert stored["pools"][0] == {"name": "actor", "network": {}, "resourcesPerGPU": {}}
    assert (stored["runPolicy"], stored["telemetry"]) == ({"failurePolicy": {}, "suspend": False}, {})
    ref = reference(stored)
    assert ref is not None
    _, spec = parse_with(stored, pinned(ref, TEMPLATE))
    _, given = parse_with(named(JOB, "incomplete", pools=[{"name": "actor"}, {"name": "critic"}])["spec"],
                          pinned(ref, TEMPLATE))  # fmt: skip
    assert spec == given


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (("image",), "spec.image: image is required, in the job or in its template"),
        (("storage",), "spec.storage.claimName: storage.claimName is required"),
        (("pools",), "spec.pools: pools is required"),
        (("pools", 0, "gpusPerNode"), 'spec.pools: ["actor"]: pools[].gpusPerNode is required'),
    ],
    ids=lambda place: str(place[-1]) if isinstance(place, tuple) else "",
)
def test_a_job_without_a_template_needs_everything_itself(kubectl: Kubectl, place: Any, says: str) -> None:
    done = kubectl.apply({**GOOD, "spec": changed(GOOD["spec"], {place: GONE})})

    assert f"{POLICY_DENIED}{says}" in done.stderr


def test_rules_that_read_no_field_of_a_template_hold_for_a_job_with_one_too(kubectl: Kubectl) -> None:
    done = kubectl.apply(named(JOB, "bad", actor={"miniBatchSize": 7}))

    assert f"{POLICY_DENIED}spec.actor.miniBatchSize: 7: actor.miniBatchSize must divide" in done.stderr


@pytest.mark.parametrize("scope", ["ppojobtemplate", "clusterppojobtemplate"])
def test_kubectl_get_shows_image_pools_queue_and_limit(kubectl: Kubectl, scope: str) -> None:
    kind = {"ppojobtemplate": "PPOJobTemplate", "clusterppojobtemplate": "ClusterPPOJobTemplate"}[scope]
    template = {**TEMPLATE["spec"]["template"], "runPolicy": {"queueName": "research"}}
    name = f"columns-{uuid.uuid4().hex[:6]}"
    kubectl.create({**named(TEMPLATE, name, template=template), "kind": kind})
    try:
        header, row = kubectl("get", scope, name).splitlines()
    finally:
        kubectl("delete", scope, name)

    assert header.split() == ["NAME", "IMAGE", "POOLS", "QUEUE", "MAX-GPUS", "AGE"]
    assert row.split()[:-1] == [name, "trainer:1", "actor", "research", "8"]


def test_kubectl_explain_reads_well(kubectl: Kubectl) -> None:
    text = kubectl("explain", "ppojobtemplate.spec", "--recursive")

    assert [word for word in ("poolDefaults", "maxGPUs", "claimName") if word not in text] == []


@pytest.fixture
def requiring(cluster: Kubectl) -> Iterator[Kubectl]:
    """kubectl for a namespace whose label requires a template for all namespaces."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster("create", "namespace", name)
    yield Kubectl(name)
    cluster("delete", "namespace", name, "--wait=false")


CLUSTER_JOB = named(JOB, "governed", templateRef={"kind": "ClusterPPOJobTemplate", "name": "gpus"})
TRY = ("create", "--dry-run=server", "--filename=-")
REQUIRED = "this namespace requires a template"


def require(kubectl: Kubectl, value: str) -> None:
    """Set the label, and wait until the policy sees it, which it does with a delay."""
    kubectl("label", "namespace", kubectl.namespace, f"{LABEL_REQUIRE_TEMPLATE}={value}", "--overwrite")
    end = time.monotonic() + _LIMIT_SECONDS
    while REQUIRED not in (said := kubectl.run(*TRY, stdin=json.dumps(GOOD)).stderr):
        assert time.monotonic() < end, said
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("value", "refused"),
    [("Any", {"good"}), ("PPOJobTemplate", {"good"}), ("ClusterPPOJobTemplate", {"good", "namespaced"})],
)
def test_a_namespace_may_require_a_template(requiring: Kubectl, value: str, refused: set[str]) -> None:
    require(requiring, value)

    jobs = {"good": GOOD, "namespaced": JOB, "cluster": CLUSTER_JOB}
    answers = {name: requiring.run(*TRY, stdin=json.dumps(manifest)) for name, manifest in jobs.items()}

    assert {name for name, done in answers.items() if done.returncode} == refused
    for name in refused:
        assert f"{POLICY_DENIED}spec.templateRef: {REQUIRED}" in answers[name].stderr


def test_a_job_that_existed_before_the_label_can_be_managed(requiring: Kubectl) -> None:
    requiring.create(GOOD)
    requiring.create(CLUSTER_JOB)
    require(requiring, "ClusterPPOJobTemplate")
    patch = ("patch", "--type=merge", "ppojob")

    requiring(*patch, "good", '--patch={"spec": {"runPolicy": {"suspend": true}}}')
    removed = requiring.run(*patch, "governed", '--patch={"spec": {"templateRef": null}}')

    assert REQUIRED in removed.stderr
