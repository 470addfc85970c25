"""Names, labels and owners of a job's objects.

The status server uses it to check the ServiceAccount of a token. Names are a function of the job and the operator's
key, so a reconcile finds the objects that an interrupted one has created.
"""

import hashlib
import hmac
from collections.abc import Mapping

from ppojob_api.v1alpha1 import constants
from ppojob_operator.plan import JobKey, Manifest

HEAD_CONTAINER = "ray-head"
WORKER_CONTAINER = "ray-worker"
FETCH_CONTAINER = "fetch"
DASHBOARD_PORT = 8265

_HASH_LENGTH = 10


def service_account_name(job: str) -> str:
    """Return the ServiceAccount of the job's pods."""
    return f"{job}-trainer"


def config_map_name(job: str) -> str:
    """Return the ConfigMap with job.json."""
    return f"{job}-job"


def network_policy_name(job: str) -> str:
    """Return the NetworkPolicy of the job's pods."""
    return f"{job}-ray"


def fetch_job_name(job: str) -> str:
    """Return the batch/v1 Job that fetches the job's models and data."""
    return f"{job}-fetch"


def cluster_name(job: str, uid: str, attempt: int, secret: bytes) -> str:
    """Return the name of an attempt's RayCluster: a DNS-1035 label of at most 51 characters; KubeRay allows 53.

    The name depends on the job's uid and on the attempt, so a re-created job or a later attempt gets another one.
    `secret` is the operator's key, so nobody else can predict the name, and with it the name of the Secret.
    """
    digest = hmac.new(secret, f"RayCluster/{uid}/{attempt}".encode(), hashlib.sha256).hexdigest()
    return f"{job}-{digest[:_HASH_LENGTH]}"


def dashboard_secret_name(cluster: str) -> str:
    """Return the Secret with the token of the RayCluster's dashboard."""
    return f"{cluster}-ray"


def submission_id(uid: str, attempt: int) -> str:
    """Return Ray's id for an attempt. Ray accepts an id once."""
    return f"ppojob-{uid}-{attempt}"


def dashboard_url(head_service: str, namespace: str) -> str:
    """Return the address of Ray's dashboard inside the cluster."""
    return f"http://{head_service}.{namespace}.svc:{DASHBOARD_PORT}"


def labels(job: str) -> dict[str, str]:
    """Return the labels of all objects of a job."""
    return {constants.LABEL_JOB: job, constants.LABEL_MANAGED_BY: constants.FIELD_MANAGER_OPERATOR}


def metadata(name: str, key: JobKey, uid: str, more_labels: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return the metadata of an object that is deleted with its job."""
    owner = {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "name": key.name,
        "uid": uid,
        "controller": True,
    }
    own = {**labels(key.name), **(more_labels or {})}
    return {"name": name, "namespace": key.namespace, "labels": own, "ownerReferences": [owner]}


def is_owned(raw: Manifest, uid: str) -> bool:
    """Return whether the owner with that uid controls the object. The label alone proves nothing."""
    owners = raw["metadata"].get("ownerReferences", [])
    return any(owner.get("controller") and owner["uid"] == uid for owner in owners)
