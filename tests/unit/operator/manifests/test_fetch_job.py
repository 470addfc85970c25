"""The Job that fetches models and data has what the head's pod has, but no Ray, no sidecar and no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.progress import FETCH_REFUSED_EXIT_CODE
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests.fetch_job import fetch_job
from ppojob_operator.manifests.pod import head_template
from tests.unit.operator.reconcile.worlds import KEY, UID

MakeSpec = Callable[..., PPOJobSpec]


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


def test_the_job_belongs_to_the_ppojob_and_has_its_labels(make_spec: MakeSpec) -> None:
    job = fetch_job(make_spec(), KEY, UID)

    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["metadata"]["name"] == f"{KEY.name}-fetch"
    [owner] = job["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (UID, True)
    assert job["metadata"]["labels"][constants.LABEL_JOB] == KEY.name
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert (labels[constants.LABEL_JOB], labels[constants.LABEL_TASK]) == (KEY.name, "fetch")


def test_a_job_in_a_queue_has_no_label_of_it_here(make_spec: MakeSpec) -> None:
    job = fetch_job(make_spec(runPolicy={"queueName": "gpus"}), KEY, UID)

    assert constants.LABEL_QUEUE not in str(job)


def test_the_container_is_the_heads_without_ray(make_spec: MakeSpec) -> None:
    env = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}]
    spec = make_spec(env=env, envFrom=[{"secretRef": {"name": "aws"}}])
    [head] = head_template(spec, KEY, UID)["spec"]["containers"]

    [container] = pod_of(fetch_job(spec, KEY, UID))["containers"]

    for name in ("image", "env", "envFrom", "securityContext", "volumeMounts"):
        assert container[name] == head[name]
    assert "lifecycle" not in container
    assert "ports" not in container
    assert container["command"][:3] == ["python", "-m", "ppojob_trainer.commands.fetch"]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert not [name for name in container["resources"]["requests"] if "/" in name], "no GPU"


def test_scheduling_and_pod_security_are_the_heads(make_spec: MakeSpec) -> None:
    template = {
        "metadata": {"annotations": {"team": "rl"}},
        "spec": {
            "priorityClassName": "high",
            "runtimeClassName": "gvisor",
            "containers": [
                {"name": "ray-head", "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}]},
                {"name": "sidecar", "image": "x"},
            ],
            "initContainers": [{"name": "init", "image": "x"}],
            "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        },
    }
    head = {"nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "cpu"}], "podTemplate": template}
    spec = make_spec(head=head, imagePullSecrets=[{"name": "registry"}], serviceAccountName="trainer")

    job = fetch_job(spec, KEY, UID)
    pod = pod_of(job)

    assert [container["name"] for container in pod["containers"]] == ["fetch"]
    assert "initContainers" not in pod
    assert {"name": "ca", "mountPath": "/etc/ca"} in pod["containers"][0]["volumeMounts"]
    assert {"name": "ca", "configMap": {"name": "ca"}} in pod["volumes"]
    assert pod["nodeSelector"] == {"disk": "fast"}
    assert {"key": "cpu"} in pod["tolerations"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["serviceAccountName"] == "trainer"
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("high", "gvisor")
    assert pod["securityContext"] == head_template(spec, KEY, UID)["spec"]["securityContext"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["restartPolicy"] == "Never"
    assert job["spec"]["template"]["metadata"]["annotations"] == {"team": "rl"}


def test_what_is_refused_ends_the_job_and_what_a_node_takes_counts_as_no_try(make_spec: MakeSpec) -> None:
    refused, disrupted = fetch_job(make_spec(), KEY, UID)["spec"]["podFailurePolicy"]["rules"]

    assert refused["action"] == "FailJob"
    assert refused["onExitCodes"]["values"] == [FETCH_REFUSED_EXIT_CODE]
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")


def test_another_environment_is_another_digest(make_spec: MakeSpec) -> None:
    def digest(**changes: Any) -> str:
        made_of: str = fetch_job(make_spec(**changes), KEY, UID)["metadata"]["annotations"][
            constants.ANNOTATION_MADE_OF
        ]
        return made_of

    assert digest() == digest()
    assert digest() != digest(env=[{"name": "HF_ENDPOINT", "value": "https://mirror"}])
