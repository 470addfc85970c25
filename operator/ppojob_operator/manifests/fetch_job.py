"""The batch/v1 Job that fetches models and data into the storage, before any pod with GPUs exists.

Its pod is the head's without Ray: the same image, environment, ServiceAccount, scheduling and pod security, and with
them the user's pod template, but no other containers. The operator gives it no queue. Kueue suspends it only in a
namespace with a default queue, or where it manages Jobs without a queue (`manageJobsWithoutQueueName`).
"""

import hashlib
import json
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.progress import FETCH_REFUSED_EXIT_CODE
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests import naming, pod_template
from ppojob_operator.manifests.pod import head_template
from ppojob_operator.plan import JobKey

_COMMAND = ["python", "-m", "ppojob_trainer.commands.fetch", "--job"]
_RESOURCES = {"requests": {"cpu": "500m", "memory": "2Gi"}, "limits": {"memory": "4Gi"}}
_TRIES = 10
"""Kubernetes pauses 10 s before the second, and twice as long before each further one, up to 6 minutes."""
_KEPT_SECONDS = 3600
_GRACE_SECONDS = 30
_OF_A_CONTAINER = ("image", "imagePullPolicy", "env", "envFrom", "securityContext", "volumeMounts")
"""Fields of the head's container that the container of the fetch has too."""
_NOT_OF_THE_POD = ("containers", "initContainers", "terminationGracePeriodSeconds")


def fetch_job(spec: PPOJobSpec, key: JobKey, uid: str) -> dict[str, Any]:
    """Return the Job. `spec` is resolved."""
    wanted = {
        "backoffLimit": _TRIES,
        # An older trainer's pod in the same folder would take the lock from the newer one.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _exit_codes()},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "ttlSecondsAfterFinished": _KEPT_SECONDS,
        "template": _template(spec, key, uid),
    }
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]
    metadata = naming.metadata(naming.fetch_job_name(key.name), key, uid)
    metadata["annotations"] = {constants.ANNOTATION_MADE_OF: digest}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": wanted}


def _exit_codes() -> dict[str, Any]:
    return {"containerName": naming.FETCH_CONTAINER, "operator": "In", "values": [FETCH_REFUSED_EXIT_CODE]}


def _template(spec: PPOJobSpec, key: JobKey, uid: str) -> dict[str, Any]:
    head = pod_template.merged(head_template(spec, key, uid), spec.head.pod_template)
    ray = next(each for each in head["spec"]["containers"] if each["name"] == naming.HEAD_CONTAINER)
    container = {
        "name": naming.FETCH_CONTAINER,
        "command": [*_COMMAND, f"{constants.CONFIG_MOUNT_PATH}/{constants.JOB_FILE}"],
        "resources": _RESOURCES,
        # The program writes its own message; if it was killed, the end of the log is the message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **{name: ray[name] for name in _OF_A_CONTAINER if name in ray},
    }
    labels = {**head["metadata"]["labels"], constants.LABEL_TASK: constants.TASK_FETCH}
    pod = {name: value for name, value in head["spec"].items() if name not in _NOT_OF_THE_POD}
    return {
        "metadata": {**head["metadata"], "labels": labels},
        "spec": {**pod, "terminationGracePeriodSeconds": _GRACE_SECONDS, "containers": [container]},
    }
