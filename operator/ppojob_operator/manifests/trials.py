"""What is tried on the API server before a running trainer is stopped for another RayCluster.

The RayCluster itself shows what its CRD and webhooks refuse. The CRD checks pod templates by types alone: KubeRay
creates the pods, and only then the API server says that a volume's name is used twice. The template of a batch/v1 Job
is validated like a pod when the Job is created, so each pod template is also tried as one. The operator has the right
to create Jobs, because of `fetch_job.py`; it needs none to create pods.
"""

from dataclasses import dataclass
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_operator.plan import Manifest

_NOT_A_REFUSAL = ("exceeded quota", "does not support dry run")
"""The stopped RayCluster frees its quota; and a webhook that knows no dry run may accept the object itself."""
_OF_A_FIELD = (" is invalid: ", "Kind=Job): .")
"""Before the field in a message of the API server's validation, and of server-side apply."""
_OF_JOBS = ("controller-uid", "job-name", "batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name")
"""Labels of a pod template for which a Job wants its own values; a RayCluster's pods may have any."""


@dataclass(frozen=True)
class Trial:
    """One object to apply as a dry run."""

    manifest: Manifest
    template: str = ""
    """Path of the pod template in the PPOJob. Empty: the object is the RayCluster."""

    def refusal(self, words: str) -> str:
        """Return the API server's message for the PPOJob's owner; empty: it says nothing about a later request."""
        if any(each in words for each in _NOT_A_REFUSAL):
            return ""
        if not self.template:
            return words
        # Only what the API server says of the pod itself: policies and webhooks for Jobs say nothing about pods. And
        # without the name of a Job that does not exist.
        said = next((said for sign in _OF_A_FIELD if (said := words.partition(sign)[2])), "")
        return said.replace("spec.template", self.template) if "spec.template" in said else ""


def trials(cluster: Manifest) -> tuple[Trial, ...]:
    """Return what to try for a RayCluster: itself, and the pod templates of its head and of each pool."""
    head, groups = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    pools = (Trial(_job(cluster, group), f"spec.pools[{index}].podTemplate") for index, group in enumerate(groups))
    return (Trial(cluster), Trial(_job(cluster, head), "spec.head.podTemplate"), *pools)


def _job(cluster: Manifest, group: Manifest) -> dict[str, Any]:
    """Return a Job that is never run, without the labels by which Kueue and other schedulers queue a RayCluster."""
    found = cluster["metadata"]
    labels = {name: found["labels"][name] for name in (constants.LABEL_JOB, constants.LABEL_MANAGED_BY)}
    metadata = {name: found[name] for name in ("name", "namespace", "ownerReferences")}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**metadata, "labels": labels},
        "spec": {"suspend": True, "template": _without_labels_of_jobs(group["template"])},
    }


def _without_labels_of_jobs(template: Manifest) -> Manifest:
    metadata = template["metadata"]
    labels = {name: value for name, value in metadata.get("labels", {}).items() if name not in _OF_JOBS}
    return {**template, "metadata": {**metadata, "labels": labels}}
