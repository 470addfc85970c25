"""Specs with which the operator once failed, or whose pods did: the fuzz tests run them first.

Each is an example with one field changed. A new find of the fuzz becomes a row.
"""

from dataclasses import dataclass
from typing import Any

from tests.fuzz.specs import CLAIM, ITEM, Keys, examples, put

_POOL = ("pools", ITEM)
_TEMPLATE = (*_POOL, "podTemplate")
_AT = "pools[0].podTemplate"
_DATA = {
    "huggingFace": {"path": "/data/prompts"},
    "files": {"paths": ["/data/train.parquet"], "prompt": {"column": "prompt"}},
}


@dataclass(frozen=True)
class Find:
    """One changed field of an example."""

    name: str
    path: Keys
    """The field in the spec."""
    value: Any
    refused: str = ""
    """The field that the operator refuses, below the spec. Empty: it renders the spec, and the API server has the last
    word on the objects."""

    def spec(self) -> dict[str, Any]:
        """Return the whole spec, with one pool."""
        spec = examples()[0]
        spec["storage"]["claimName"] = CLAIM
        put(spec, self.path, self.value)
        return spec


def _merge_keys() -> list[Find]:
    """Return lists whose merge keys are lists, each once an exception at each reconcile."""
    of_ours = (*_TEMPLATE, "spec", "containers")
    return [
        Find("a container's name", of_ours, [{"name": ["a"]}], f"{_AT}.spec.containers[0].name"),
        Find("a variable's name", of_ours, [{"name": "ray-worker", "env": [{"name": ["a"]}]}],
             f"{_AT}.spec.containers[0].env[0].name"),
        Find("a port", of_ours, [{"name": "ray-worker", "ports": [{"containerPort": ["a"]}]}],
             f"{_AT}.spec.containers[0].ports[0].containerPort"),
        Find("a mount's path", of_ours, [{"name": "ray-worker", "volumeMounts": [{"mountPath": ["a"]}]}],
             f"{_AT}.spec.containers[0].volumeMounts[0].mountPath"),
        Find("a volume's name", (*_TEMPLATE, "spec", "volumes"), [{"name": ["a"]}], f"{_AT}.spec.volumes[0].name"),
        Find("a secret's name", ("imagePullSecrets",), [{"name": ["a"]}], "imagePullSecrets[0].name"),
        Find("a toleration's key", (*_POOL, "tolerations"), [{"key": ["a"]}], "pools[0].tolerations[0].key"),
    ]  # fmt: skip


FINDS = (
    Find("the storage over the shared memory", ("storage", "mountPath"), "/dev/shm", "storage.mountPath"),
    Find("the storage over the kernel's files", ("storage", "mountPath"), "/proc", "storage.mountPath"),
    Find("the storage that leads elsewhere", ("storage", "mountPath"), "/data/../etc", "storage.mountPath"),
    Find("a volume over the storage", (*_TEMPLATE, "spec", "containers"),
         [{"name": "ray-worker", "volumeMounts": [{"name": "a", "mountPath": "/data/"}]}],
         f"{_AT}.spec.containers[0].volumeMounts[0].mountPath"),
    Find("a secret twice", ("imagePullSecrets",), [{"name": "a"}, {"name": "a"}]),
    Find("seconds as text", (*_POOL, "tolerations"), [{"key": "a", "operator": "Exists", "tolerationSeconds": "5"}]),
    Find("a boolean as a node's label", (*_TEMPLATE, "spec", "nodeSelector"), {"gpu": True}),
    Find("a list as labels", (*_TEMPLATE, "metadata", "labels"), ["a"], f"{_AT}.metadata.labels"),
    Find("null as labels", (*_TEMPLATE, "metadata", "labels"), None, f"{_AT}.metadata.labels"),
    *_merge_keys(),
    Find("an image with spaces", ("image",), "a b;c", "image"),
    Find("an image of spaces", ("image",), "  ", "image"),
    Find("an image with NUL", ("image",), "trainer\x00:1", "image"),
    Find("no memory", (*_POOL, "resourcesPerGPU"), {"memory": "0"}, "pools[0].resourcesPerGPU"),
    Find("more shared memory than memory", (*_POOL, "resourcesPerGPU"), {"memory": "1Gi", "shm": "2Gi"},
         "pools[0].resourcesPerGPU.shm"),
    Find("two sources of data", ("data", "train"), _DATA, "data.train"),
    Find("the node's processes", (*_TEMPLATE, "spec", "hostPID"), True, f"{_AT}.spec.hostPID"),
    Find("a container named like ours", (*_TEMPLATE, "spec", "containers"), [{"name": "ray-worker", "image": "a"}]),
    Find("an init container named like ours", (*_TEMPLATE, "spec", "initContainers"), [{"name": "ray-worker"}],
         f"{_AT}.spec.initContainers[0].name"),
    Find("an init container named like KubeRay's", (*_TEMPLATE, "spec", "initContainers"), [{"name": "wait-gcs-ready"}],
         f"{_AT}.spec.initContainers[0].name"),
    Find("a command for our container", (*_TEMPLATE, "spec", "containers"), [{"name": "ray-worker", "command": ["a"]}],
         f"{_AT}.spec.containers[0].command"),
)  # fmt: skip
