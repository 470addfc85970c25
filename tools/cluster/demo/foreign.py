"""What a cluster of the user's must have, looked at before anything is made there; each lack with its remedy.

Called by `run` for a cluster that is not ours. It only reads.
"""

from __future__ import annotations

import shutil

from tools.cluster.demo.manifests import CLAIM
from tools.cluster.demo.target import NAMESPACE, Target
from tools.cluster.errors import ClusterError

RAY_CLUSTERS = "rayclusters.ray.io"
_IS_DEFAULT = "storageclass.kubernetes.io/is-default-class"


def check(target: Target) -> str:
    """Return a short description of the cluster.

    Raises:
        ClusterError: something is missing; the message says what to do.
    """
    _require_programs()
    version = _version(target)
    _require_kuberay(target)
    return f"Kubernetes {version}, KubeRay, {_storage(target)}"


def _require_programs() -> None:
    for program, module in (("kubectl", "kubernetes"), ("helm", "helm")):
        if shutil.which(program) is None:
            raise ClusterError(
                f"the program {program} is not on PATH: install it, or build it with "
                f"`python -m tools.cluster build {module}`; `make demo` then finds it"
            )


def _version(target: Target) -> str:
    try:
        version: str = target.json("version")["serverVersion"]["gitVersion"]
    except (ClusterError, KeyError) as error:
        raise ClusterError(
            f"the API server of KUBECONFIG={target.kubeconfig} does not answer: {error}\n"
            "See that `kubectl get nodes` works with that KUBECONFIG"
        ) from error
    return version


def _require_kuberay(target: Target) -> None:
    served = target.kubectl("api-resources", "--api-group=ray.io", "--output=name", "--cached=false").split()
    if RAY_CLUSTERS not in served:
        raise ClusterError(
            f"KubeRay is not installed there (the API server does not know {RAY_CLUSTERS}): install the chart "
            "kuberay-operator 1.6 from https://ray-project.github.io/kuberay-helm, then run this again"
        )


def _storage(target: Target) -> str:
    if target.has("persistentvolumeclaim", CLAIM):
        return f"the claim {NAMESPACE}/{CLAIM} that is there"
    classes = target.json("get", "storageclasses")["items"]
    defaults = [
        item["metadata"]["name"]
        for item in classes
        if item["metadata"].get("annotations", {}).get(_IS_DEFAULT) == "true"
    ]
    if not defaults:
        names = ", ".join(item["metadata"]["name"] for item in classes) or "none"
        raise ClusterError(
            f"no StorageClass is the default one (there are: {names}), so the demo's claim would wait for ever. "
            f"Either mark one with the annotation {_IS_DEFAULT}=true, or make the claim yourself: "
            f"`kubectl create namespace {NAMESPACE}`, then in it a PersistentVolumeClaim {CLAIM} of 20Gi, "
            "ReadWriteMany unless all pods run on one node"
        )
    return f"the default StorageClass {defaults[0]}"
