"""The RayCluster of a job: a head without GPUs, and one worker group per pool.

Ray's resources (`num-gpus`, `num-cpus`, the pool's resource) are explicit, because KubeRay derives them from some
resource names only. The autoscaler is off, because the spec says how many pods a pool requests: all of a fixed pool,
and `maxNodes` of an elastic one, of which KubeRay creates as many as the cluster has room for.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.pools import Pool, Scheduling
from ppojob_api.v1alpha1.quantities import parse_quantity
from ppojob_api.v1alpha1.resolve import reward_workers
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import FieldError
from ppojob_operator.manifests import naming, pod_template
from ppojob_operator.manifests.pod import head_template, pool_template
from ppojob_operator.manifests.queues import made_of, queue_labels
from ppojob_operator.plan import JobKey

API_VERSION = "ray.io/v1"
KIND = "RayCluster"
RAY_VERSION = "2.60.0"
"""Ray's version in the trainer image. KubeRay uses it to choose probes without wget, and for the token."""
_LARGEST_WEIGHT = 100
_TEMPLATE_FIELD = re.compile(
    r"\bspec\.(?:headGroupSpec|workerGroupSpecs\[(\d+)\])\.template((?:\.[A-Za-z]\w*|\[[^\]]*\])*)"
)


def ray_cluster(
    spec: PPOJobSpec, key: JobKey, uid: str, name: str, avoided_nodes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the RayCluster, whose pods prefer other nodes than `avoided_nodes`.

    `spec` is resolved and `template_problems` found nothing in it.
    """
    head = _avoiding(head_template(spec, key, uid), avoided_nodes)
    desired = {
        "rayVersion": RAY_VERSION,
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token", "secretName": naming.dashboard_secret_name(name)},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": pod_template.merged(head, spec.head.pod_template),
        },
        "workerGroupSpecs": [_worker_group(spec, pool, key, name, avoided_nodes) for pool in spec.pools],
    }
    metadata = naming.metadata(name, key, uid, queue_labels(spec.run_policy, name))
    metadata["annotations"] = made_of(desired)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": desired}


def with_job_fields(words: str) -> str:
    """Return the API server's message about a RayCluster with the PPOJob's fields for those of its pod templates."""
    fields = []
    for index, path in _TEMPLATE_FIELD.findall(words):
        fields.append(f"spec.pools[{index}].podTemplate{path}" if index else f"spec.head.podTemplate{path}")
    return f"{words}; see {', '.join(dict.fromkeys(fields))} of the PPOJob" if fields else words


def template_problems(spec: PPOJobSpec, key: JobKey, uid: str) -> Iterator[FieldError]:
    """Yield the settings in `podTemplate` and in other free-form fields that would break Ray. `spec` is resolved."""
    for index, variable in enumerate(spec.env):
        if variable.name in pod_template.RESERVED_ENV:
            remedy = "this variable is set by the operator or by KubeRay: choose another name"
            yield FieldError(f"spec.env[{index}].name", variable.name, remedy)
    yield from pod_template.unkeyed(spec.image_pull_secrets, "name", "spec.imagePullSecrets")
    yield from _toleration_problems(spec.head, "spec.head")
    head = head_template(spec, key, uid)
    yield from pod_template.problems(head, spec.head.pod_template, "spec.head.podTemplate")
    for index, pool in enumerate(spec.pools):
        yield from _toleration_problems(pool, f"spec.pools[{index}]")
        base = pool_template(spec, pool, key, "")
        yield from pod_template.problems(base, pool.pod_template, f"spec.pools[{index}].podTemplate")


def _toleration_problems(scheduling: Scheduling, path: str) -> Iterator[FieldError]:
    for index, toleration in enumerate(scheduling.tolerations):
        key = toleration.get("key", "")
        if not isinstance(key, str):
            here, shown = f"{path}.tolerations[{index}].key", "null" if key is None else key
            yield FieldError(here, shown, "must be a string: the key of a taint, or leave the field out for all taints")


def logical_cpus(spec: PPOJobSpec, pool: Pool) -> int:
    """Return the logical CPUs of a pod for Ray. They limit nothing.

    Each GPU's bundle and each scoring process needs one, even if the pod has fewer.
    """
    real = parse_quantity(pool.resources_per_gpu.cpu) * pool.gpus_per_node
    return max(math.ceil(real), pool.gpus_per_node + reward_workers(spec).get(pool.name, 0))


def _avoiding(template: dict[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """Return the pod template with a preference for other nodes, so that a small cluster still runs the pods."""
    if not nodes:
        return template
    # By name: a node's label kubernetes.io/hostname may differ. The API server takes one name for each requirement.
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    term = {"weight": _LARGEST_WEIGHT, "preference": {"matchFields": others}}
    preferred = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    affinity = {**template["spec"].get("affinity", {}), **preferred}
    return {**template, "spec": {**template["spec"], "affinity": affinity}}


def _worker_group(
    spec: PPOJobSpec, pool: Pool, key: JobKey, cluster: str, avoided_nodes: Sequence[str]
) -> dict[str, Any]:
    template = _avoiding(pool_template(spec, pool, key, cluster), avoided_nodes)
    resources = json.dumps({f"{constants.POOL_RESOURCE_PREFIX}{pool.name}": pool.gpus_per_node})
    return {
        "groupName": pool.name,
        "replicas": pool.nodes,
        "minReplicas": pool.needed_nodes,
        "maxReplicas": pool.nodes,
        "rayStartParams": {
            "num-cpus": str(logical_cpus(spec, pool)),
            "num-gpus": str(pool.gpus_per_node),
            # KubeRay inserts this into a shell command, so the JSON is quoted and escaped.
            "resources": json.dumps(resources),
        },
        "template": pod_template.merged(template, pool.pod_template),
    }
