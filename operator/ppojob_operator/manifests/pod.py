"""The pods of Ray's head and of a pool, before KubeRay adds Ray's own command, probes and environment.

Pods meet the restricted Pod Security Standard and have no token of the API server. A pool's `network.hostNetwork` and
`network.rdma` are the only exceptions. Only the head has the token for progress reports, as the driver runs there.
"""

from pathlib import PurePosixPath
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.network import PoolNetwork
from ppojob_api.v1alpha1.pools import Head, Pool, Spread
from ppojob_api.v1alpha1.progress import progress_audience
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests import naming
from ppojob_operator.manifests.quantity import times
from ppojob_operator.manifests.queues import topology_annotations
from ppojob_operator.plan import JobKey

STORAGE_GROUP = 1000
"""fsGroup: the group that may write to the storage, for volumes that support it."""

_STORAGE = "storage"
_CONFIG = "ppojob-config"
_TOKEN = "ppojob-token"
_SHARED_MEMORY = "shared-memory"

_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}

_LOST_NODE_SECONDS = 60
_RAYS_OWN_END_SECONDS = 30
"""Time for Ray to end after the preStop hook: Kubernetes' default grace period."""
_HOSTNAME = "kubernetes.io/hostname"


def head_template(spec: PPOJobSpec, key: JobKey, uid: str) -> dict[str, Any]:
    """Return the pod template of the head, without the user's own. `spec` is resolved."""
    resources = spec.head.resources
    container = _container(naming.HEAD_CONTAINER, spec)
    container["resources"] = _resources(resources.cpu, resources.memory, {})
    container["volumeMounts"].append({"name": _TOKEN, "mountPath": constants.TOKEN_MOUNT_PATH, "readOnly": True})
    container["ports"] = _head_ports(spec.telemetry.prometheus_port)
    pod = _pod_spec(spec, spec.head, key, container)
    pod["volumes"].append({"name": _TOKEN, "projected": {"sources": [{"serviceAccountToken": _token(key, uid)}]}})
    return {"metadata": {"labels": naming.labels(key.name)}, "spec": pod}


def _head_ports(prometheus_port: int) -> list[dict[str, Any]]:
    """Return the ports of the head. KubeRay creates the Service from them, or from Ray's defaults if there are none."""
    ports = dict(constants.RAY_HEAD_PORTS)
    if prometheus_port:
        ports[constants.METRICS_PORT_NAME] = prometheus_port
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def pool_template(spec: PPOJobSpec, pool: Pool, key: JobKey, cluster: str) -> dict[str, Any]:
    """Return the pod template of a pool, without the user's own. `spec` is resolved."""
    gpus, each = pool.gpus_per_node, pool.resources_per_gpu
    container = _container(naming.WORKER_CONTAINER, spec)
    if pool.elastic is not None:
        container["lifecycle"]["preStop"]["exec"]["command"].append("--follow")
    _add_caches(container, spec)
    _add_network(container, pool.network)
    extended = {pool.gpu_resource_name: str(gpus)} if pool.gpu_resource_name else {}
    if pool.network.rdma is not None:
        extended[pool.network.rdma.resource_name] = str(pool.network.rdma.count)
    container["resources"] = _resources(times(each.cpu, gpus), times(each.memory, gpus), extended)
    if pool.resource_claims:
        container["resources"]["claims"] = [{"name": claim.name} for claim in pool.resource_claims]
    container["volumeMounts"].append({"name": _SHARED_MEMORY, "mountPath": "/dev/shm"})
    pod = _pod_spec(spec, pool, key, container)
    # KubeRay's init container waits for the head in a shell. As process 1 of a PID namespace, it would ignore SIGTERM,
    # and a deleted pod would keep its GPUs for the whole grace period.
    pod["shareProcessNamespace"] = True
    shared_memory = {"medium": "Memory", "sizeLimit": times(each.shm, gpus)}
    pod["volumes"].append({"name": _SHARED_MEMORY, "emptyDir": shared_memory})
    if pool.resource_claims:
        pod["resourceClaims"] = [claim.to_wire() for claim in pool.resource_claims]
    if pool.nodes > 1:
        pod |= _spread(pool, cluster)
    if pool.network.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    metadata: dict[str, Any] = {"labels": {**naming.labels(key.name), constants.LABEL_POOL: pool.name}}
    if pool.topology is not None:
        metadata["annotations"] = topology_annotations(pool.topology)
    return {"metadata": metadata, "spec": pod}


def _pod_spec(spec: PPOJobSpec, scheduling: Pool | Head, key: JobKey, container: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "containers": [container],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": spec.run_policy.stop_grace_period_seconds + _RAYS_OWN_END_SECONDS,
        "serviceAccountName": spec.service_account_name or naming.service_account_name(key.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": STORAGE_GROUP,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [*scheduling.tolerations, *_lost_node_tolerations(scheduling.tolerations)],
        "volumes": [
            {"name": _STORAGE, "persistentVolumeClaim": {"claimName": spec.storage.claim_name}},
            {"name": _CONFIG, "configMap": {"name": naming.config_map_name(key.name)}},
        ],
    }
    if scheduling.node_selector:
        pod["nodeSelector"] = dict(scheduling.node_selector)
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = list(spec.image_pull_secrets)
    return pod


def _container(name: str, spec: PPOJobSpec) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": name,
        "image": spec.image,
        "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
        "lifecycle": {"preStop": {"exec": {"command": _hold(spec)}}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": _STORAGE, "mountPath": spec.storage.mount_path},
            {"name": _CONFIG, "mountPath": constants.CONFIG_MOUNT_PATH, "readOnly": True},
        ],
    }
    given = [variable.to_wire() for variable in spec.env]
    names = {variable["name"] for variable in given}
    container["env"] = [*(own for own in container["env"] if own["name"] not in names), *given]
    if spec.env_from:
        container["envFrom"] = list(spec.env_from)
    return container


def _add_caches(container: dict[str, Any], spec: PPOJobSpec) -> None:
    """Put the compile caches of vLLM, Inductor and Triton into the storage, for later attempts and other jobs.

    The names of entries contain versions and GPU type, and entries are written atomically, so pods can share them. The
    user's variables win: a folder on the node's disk is faster, and some file systems have no locks.
    """
    if spec.device is not Device.CUDA:
        return
    root = PurePosixPath(spec.storage.mount_path) / constants.CACHE_FOLDER
    given = {variable["name"] for variable in container["env"]}
    container["env"] += [
        {"name": name, "value": str(root / folder)} for name, folder in _CACHES.items() if name not in given
    ]


def _hold(spec: PPOJobSpec) -> list[str]:
    """Return the preStop hook, which delays the pod's termination until the trainer has saved a checkpoint.

    When a queue suspends the RayCluster, KubeRay deletes all pods at once, and Ray gives a driver three seconds only.
    """
    return ["ppojob", "hold", "--limit", str(spec.run_policy.stop_grace_period_seconds)]


def _add_network(container: dict[str, Any], network: PoolNetwork) -> None:
    """Add the pool's network variables, which override the job's, and the capability that RDMA needs."""
    own = network.environment()
    others = [variable for variable in container["env"] if variable["name"] not in own]
    container["env"] = [*others, *({"name": name, "value": value} for name, value in own.items())]
    if network.rdma is not None:
        # The device accesses memory without the kernel, so the memory must be locked.
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]


def _resources(cpu: str, memory: str, extended: dict[str, str]) -> dict[str, Any]:
    """Return requests and limits. CPU has no limit: pods may use idle cores, and throttling stalls NCCL."""
    return {"requests": {"cpu": cpu, "memory": memory, **extended}, "limits": {"memory": memory, **extended}}


def _token(key: JobKey, uid: str) -> dict[str, Any]:
    return {
        "audience": progress_audience(key.namespace, key.name, uid),
        "expirationSeconds": constants.TOKEN_EXPIRATION_SECONDS,
        "path": constants.TOKEN_FILE,
    }


def _lost_node_tolerations(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tolerations that evict pods from a lost node after one minute instead of Kubernetes' five."""
    keys = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    taken = [toleration.get("key") for toleration in given]
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_SECONDS}
        for key in keys
        if key not in taken
    ]


def _spread(pool: Pool, cluster: str) -> dict[str, Any]:
    selector = {"matchLabels": {constants.LABEL_RAY_CLUSTER: cluster, constants.LABEL_POOL: pool.name}}
    if pool.spread is Spread.REQUIRED:
        term = {"labelSelector": selector, "topologyKey": _HOSTNAME}
        return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}
    constraint = {
        "maxSkew": 1,
        "topologyKey": _HOSTNAME,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": selector,
    }
    return {"topologySpreadConstraints": [constraint]}
