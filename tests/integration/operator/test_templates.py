"""Jobs with templates, on the real API server: they wait, are completed, and keep the template that they got."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.integration.operator.conftest import pool

pytestmark = pytest.mark.usefixtures("volumes", "claim")
IMAGE = "localhost:5000/ppojob/of-the-template:1"


def template(name: str, kind: str = "PPOJobTemplate", **spec: Any) -> dict[str, Any]:
    """Return a template with pools that fit on any node."""
    fields = {
        "image": IMAGE,
        "storage": {"claimName": "data"},
        "pools": [pool("actor"), pool("critic")],
        "head": {"resources": {"cpu": "10m", "memory": "10Mi"}},
        "runPolicy": {"backoffLimit": 3},
    }
    defaults = {"nodeSelector": {"of-the": "template"}}
    return {
        "apiVersion": "ppojob.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"template": fields, "poolDefaults": defaults, **spec},
    }


def incomplete(jobs: Any, ref: dict[str, str], **changes: Any) -> str:
    """Create a job that leaves to its template what that has."""
    left = {"image", "storage", "pools", "head"} - set(changes)
    name: str = jobs.create(without=left, templateRef=ref, **changes)
    return name


def image_of(kubectl: Any, name: str) -> str:
    """Return the image of the head in the job's RayCluster."""
    [cluster] = kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={name}")["items"]
    image: str = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    return image


@pytest.fixture
def for_all(kubectl: Any) -> Iterator[str]:
    """The name of a template for all namespaces."""
    name = f"{kubectl.namespace}-gpus"
    assert kubectl.apply(template(name, "ClusterPPOJobTemplate")).returncode == 0
    yield name
    kubectl("delete", "clusterppojobtemplate", name)


def test_a_job_waits_for_its_template_and_keeps_the_one_that_it_got(kubectl: Any, jobs: Any) -> None:
    name = incomplete(jobs, {"name": "late"})
    jobs.wait_for(name, Condition.TEMPLATE_RESOLVED, "False", Reason.TEMPLATE_MISSING)
    jobs.wait_for(name, Condition.ACCEPTED, "False", Reason.TEMPLATE_MISSING)

    assert kubectl.apply(template("late")).returncode == 0
    jobs.wait_for(name, Condition.ACCEPTED, "True", Reason.VALID)
    first = jobs.wait(name, lambda status: "rayCluster" in status)
    assert image_of(kubectl, name) == IMAGE
    assert first["template"]["generation"] == 1
    assert "PPOJobTemplate late, generation 1" in jobs.condition(name, Condition.TEMPLATE_RESOLVED)["message"]

    changed = template("late")
    changed["spec"]["template"]["image"] = "localhost:5000/ppojob/later:2"
    assert kubectl.apply(changed).returncode == 0
    kubectl("delete", "ppojobtemplate", "late")
    kubectl("patch", "ppojob", name, "--type=merge", '--patch={"spec": {"runPolicy": {"backoffLimit": 9}}}')
    generation = kubectl.json("get", "ppojob", name)["metadata"]["generation"]
    last = jobs.wait(name, lambda status: status["observedGeneration"] == generation)

    assert image_of(kubectl, name) == IMAGE
    assert last["template"] == first["template"]
    assert last["rayCluster"]["name"] == first["rayCluster"]["name"]


def test_a_template_for_all_namespaces_completes_a_job(kubectl: Any, jobs: Any, for_all: str) -> None:
    name = incomplete(jobs, {"kind": "ClusterPPOJobTemplate", "name": for_all})

    jobs.wait_for(name, Condition.ACCEPTED, "True", Reason.VALID)
    jobs.wait(name, lambda status: "rayCluster" in status)
    [cluster] = kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={name}")["items"]
    [selector] = {
        json.dumps(group["template"]["spec"]["nodeSelector"]) for group in cluster["spec"]["workerGroupSpecs"]
    }
    assert json.loads(selector) == {"of-the": "template"}


def test_a_template_that_makes_an_invalid_spec_is_named_and_read_again(kubectl: Any, jobs: Any) -> None:
    bad = template("wrong")
    bad["spec"]["template"]["telemetry"] = {"prometheusPort": 8265}
    assert kubectl.apply(bad).returncode == 0
    name = incomplete(jobs, {"name": "wrong"})
    jobs.wait_for(name, Condition.ACCEPTED, "False", Reason.INVALID_SPEC)
    message = jobs.condition(name, Condition.ACCEPTED)["message"]
    assert message.startswith("spec.telemetry.prometheusPort: 8265: ")
    assert message.endswith("(the value is from PPOJobTemplate wrong)")

    assert kubectl.apply(template("wrong")).returncode == 0

    jobs.wait_for(name, Condition.ACCEPTED, "True", Reason.VALID)
    assert jobs.status(name)["template"]["generation"] == 2


def test_a_job_above_the_limits_of_its_template_gets_nothing(kubectl: Any, jobs: Any) -> None:
    assert kubectl.apply(template("small", limits={"maxGPUs": 2})).returncode == 0

    name = incomplete(jobs, {"name": "small"}, pools=[{"name": "actor", "nodes": 2}, {"name": "critic"}])

    jobs.wait_for(name, Condition.ACCEPTED, "False", Reason.INVALID_SPEC)
    assert "PPOJobTemplate small allows 2 GPUs" in jobs.condition(name, Condition.ACCEPTED)["message"]
    assert kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={name}")["items"] == []
