"""The RayCluster of a job: a head without GPUs and one worker group for each pool.

What Ray counts is written out (`num-gpus`, `num-cpus`, the pool's resource): KubeRay's own count knows only some
resource names. The autoscaler is off: a job has the GPUs that its spec says.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.pools import Pool
from ppojob_api.v1alpha1.quantities import parse_quantity
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import FieldError
from ppojob_operator.manifests import naming, pod_template
from ppojob_operator.manifests.pod import head_template, pool_template
from ppojob_operator.manifests.queues import queue_annotations, queue_labels
from ppojob_operator.plan import JobKey

API_VERSION = "ray.io/v1"
KIND = "RayCluster"
RAY_VERSION = "2.60.0"
"""Version in the trainer image. KubeRay needs it to choose probes that need no wget, and for the token."""


def ray_cluster(spec: PPOJobSpec, key: JobKey, uid: str, name: str) -> dict[str, Any]:
    """Return the RayCluster. `spec` is resolved and `template_problems` found nothing in it."""
    desired = {
        "rayVersion": RAY_VERSION,
        "enableInTreeAutoscaling": False,
        "authOptions": {"mode": "token", "secretName": naming.dashboard_secret_name(name)},
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": pod_template.merged(head_template(spec, key, uid), spec.head.pod_template),
        },
        "workerGroupSpecs": [_worker_group(spec, pool, key, name) for pool in spec.pools],
    }
    metadata = naming.metadata(name, key, uid, queue_labels(spec.run_policy, name))
    metadata |= queue_annotations(spec.run_policy, desired)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": desired}


def template_problems(spec: PPOJobSpec, key: JobKey, uid: str) -> Iterator[FieldError]:
    """Yield what in the users' pod templates and environment would break Ray. `spec` is resolved."""
    for index, variable in enumerate(spec.env):
        if variable.name in pod_template.RESERVED_ENV:
            remedy = "this variable is set by the operator or by KubeRay: choose another name"
            yield FieldError(f"spec.env[{index}].name", variable.name, remedy)
    head = head_template(spec, key, uid)
    yield from pod_template.problems(head, spec.head.pod_template, "spec.head.podTemplate")
    for index, pool in enumerate(spec.pools):
        base = pool_template(spec, pool, key, "")
        yield from pod_template.problems(base, pool.pod_template, f"spec.pools[{index}].podTemplate")


def logical_cpus(spec: PPOJobSpec, pool: Pool) -> int:
    """Return the CPUs that Ray counts in a pod of the pool; they bound nothing.

    Each GPU's bundle needs one and each process that scores needs one, even where the pod has less than that.
    """
    real = parse_quantity(pool.resources_per_gpu.cpu) * pool.gpus_per_node
    function = spec.reward.function if spec.placement.reward == pool.name else None
    scorers = function.num_workers if function is not None else 0
    return max(math.ceil(real), pool.gpus_per_node + scorers)


def _worker_group(spec: PPOJobSpec, pool: Pool, key: JobKey, cluster: str) -> dict[str, Any]:
    resources = json.dumps({f"{constants.POOL_RESOURCE_PREFIX}{pool.name}": pool.gpus_per_node})
    return {
        "groupName": pool.name,
        "replicas": pool.nodes,
        "minReplicas": pool.nodes,
        "maxReplicas": pool.nodes,
        "rayStartParams": {
            "num-cpus": str(logical_cpus(spec, pool)),
            "num-gpus": str(pool.gpus_per_node),
            # KubeRay pastes this into a shell command, hence the quotes around the escaped JSON.
            "resources": json.dumps(resources),
        },
        "template": pod_template.merged(pool_template(spec, pool, key, cluster), pool.pod_template),
    }
