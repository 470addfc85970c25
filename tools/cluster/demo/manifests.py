"""What the demo creates beside the PPOJob: the claim, the job that prepares the model, the pod that reads the storage.

Pure: dictionaries in, dictionaries out.
"""

from __future__ import annotations

import re
from typing import Any

from ppojob_operator.manifests.pod import STORAGE_GROUP
from tools.cluster.demo.target import NAMESPACE
from tools.cluster.errors import ClusterError

CLAIM = "ppojob-data"
MOUNT_PATH = "/data"
MODEL_PATH = f"{MOUNT_PATH}/models/smollm2-135m-instruct"
MODEL_JOB = "prepare-model"
STORAGE_POD = "demo-storage"
_IMAGE_LINE = re.compile(r"^  image: .*$", re.MULTILINE)


def namespace() -> dict[str, Any]:
    """The demo's namespace, with the pod security standard `restricted`, as a careful administrator sets it."""
    labels = {"pod-security.kubernetes.io/enforce": "baseline", "pod-security.kubernetes.io/warn": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}


def claim() -> dict[str, Any]:
    """A claim on the cluster's default storage class, for a cluster that is not ours."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "20Gi"}}}
    metadata = {"name": CLAIM, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def model_job(image: str) -> dict[str, Any]:
    """The Kubernetes Job that writes the model's folder into the storage."""
    command = ["ppojob", "prepare-model", "--output", MODEL_PATH]
    pod = _pod_spec(image, command, {"cpu": "200m", "memory": "1Gi"}, {"memory": "4Gi"})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": MODEL_JOB, "namespace": NAMESPACE},
        "spec": {"backoffLimit": 1, "template": {"spec": pod}},
    }


def storage_pod(image: str) -> dict[str, Any]:
    """A pod through which the demo looks into the storage; it ends by itself after two hours."""
    pod = _pod_spec(image, ["sleep", "7200"], {"cpu": "10m", "memory": "32Mi"}, {"memory": "256Mi"})
    pod["terminationGracePeriodSeconds"] = 0
    metadata = {"name": STORAGE_POD, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}


def with_image(text: str, image: str) -> str:
    """The example's text with the trainer's image replaced, everything else as it stands.

    Raises:
        ClusterError: the text has no such line, or several.
    """
    replaced, count = _IMAGE_LINE.subn(f"  image: {image}", text)
    if count != 1:
        raise ClusterError(f"the example has {count} lines `  image: ...`; the demo replaces exactly one")
    return replaced


def _pod_spec(image: str, command: list[str], requests: dict[str, str], limits: dict[str, str]) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        # A fresh volume belongs to root; the trainer's pods are in the same group.
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": STORAGE_GROUP,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "main",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": command,
                "resources": {"requests": requests, "limits": limits},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": "data", "mountPath": MOUNT_PATH}],
            }
        ],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": CLAIM}}],
    }
