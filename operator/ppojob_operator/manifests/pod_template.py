"""Merges a user's `podTemplate` into the operator's pod template.

Lists of named items are merged by name, as in `kubectl apply`. Settings that would break Ray, or that have a separate
field in the spec, are errors with their path. So is null for a field that the operator sets. The merge could ignore it,
but in a patch null removes the field, so the pods would differ from what the user wrote, without a message.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ppojob_api.v1alpha1 import constants, merging
from ppojob_api.v1alpha1.merging import INTEGER_KEYS, MERGE_KEYS, folder, identity, is_merge_key
from ppojob_api.v1alpha1.validation import FieldError

Template = dict[str, Any]

_OWN_FIELD = {
    "hostNetwork": "use network.hostNetwork of the pool",
    "hostPID": "Ray's pods must not see the processes of the node: remove it",
    "hostIPC": "Ray's pods must not share memory with the node: remove it",
    "restartPolicy": "Ray's pods are replaced instead of restarted: remove it",
    "serviceAccountName": "use spec.serviceAccountName, which applies to all pods",
    "serviceAccount": "use spec.serviceAccountName, which applies to all pods",
    "automountServiceAccountToken": "the trainer gets no credentials for the API server: remove it",
}
_RAY_COMMAND = {
    "command": "KubeRay starts Ray in this container: run your program in a separate container",
    "args": "KubeRay starts Ray in this container: run your program in a separate container",
    "resources": "use resourcesPerGPU, gpuResourceName and resourceClaims of the pool, or resources of the head",
}
_HOOK_REMEDY = (
    "the operator uses it to delay the deletion of the pod until the trainer has saved a checkpoint: "
    "run yours in a separate container"
)
RESERVED_ENV = frozenset({
    "FQ_RAY_IP", "RAY_IP", "RAY_PORT", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", constants.EnvName.RAY_CLUSTER,
    "RAY_CLUSTER_NAMESPACE", "RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME", "KUBERAY_GEN_RAY_START_CMD",
    constants.EnvName.ATTEMPT,
})  # fmt: skip
"""Variables that KubeRay or the operator sets."""

_KUBERAY_INIT = "wait-gcs-ready"
"""KubeRay's init container, which waits for the head."""
_TOPOLOGY = (constants.ANNOTATION_REQUIRED_TOPOLOGY, constants.ANNOTATION_PREFERRED_TOPOLOGY)
_TOPOLOGY_REMEDY = "use topology of the pool; the head is one pod and needs none"
_RESERVED_PREFIXES = ("ray.io/", f"{constants.GROUP}/", constants.LABEL_MANAGED_BY)
_REMEDY_RESERVED = "this name is used by the operator or by KubeRay: choose another"
_REMEDY_NULL = "null would remove what the trainer needs: leave the field out"


def merged(base: Template, user: Mapping[str, Any]) -> Template:
    """Return the template with the user's merged into it. `problems` must have found nothing."""
    return merging.merged(base, user)


def problems(base: Template, user: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    """Yield the settings in the user's template that would break Ray; `path` is the path of the template."""
    unknown = set(user) - {"metadata", "spec"}
    for name in sorted(unknown):
        yield FieldError(f"{path}.{name}", user[name], "a pod template has metadata and spec only")
    malformed = [*_removals(base, user, path), *_key_problems(user.get("spec"), f"{path}.spec")]
    yield from malformed
    if malformed:
        # The other checks need lists, objects and keys of the right types.
        return
    yield from _metadata_problems(user.get("metadata", {}), f"{path}.metadata")
    yield from _spec_problems(base["spec"], user.get("spec", {}), f"{path}.spec")


def _removals(base: Mapping[str, Any], user: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    """Yield the values that would remove a field that the operator sets, or give it another type."""
    for name in sorted(set(base) & set(user)):
        ours, value, here = base[name], user[name], f"{path}.{name}"
        if value is None:
            yield FieldError(here, None, _REMEDY_NULL)
        elif isinstance(ours, Mapping):
            if isinstance(value, Mapping):
                yield from _removals(ours, value, here)
            else:
                yield FieldError(here, value, "must be an object")
        elif isinstance(ours, list):
            yield from _removals_from_list(name, ours, value, here)


def _removals_from_list(name: str, base: list[Any], value: Any, path: str) -> Iterator[FieldError]:
    key = MERGE_KEYS.get(name)
    if not isinstance(value, list):
        # `_unkeyed` refuses it if the list has a key.
        yield from () if key else (FieldError(path, value, "must be a list"),)
        return
    if key is None:
        return
    for index, item in enumerate(value):
        for ours in base:
            is_given = isinstance(item, Mapping) and key in item
            if is_given and identity(key, ours.get(key)) == identity(key, item[key]):
                yield from _removals(ours, item, f"{path}[{index}]")


def _key_problems(pod: Any, path: str) -> Iterator[FieldError]:
    """Yield the items that cannot be merged, because they lack a key or it has a wrong type."""
    if not isinstance(pod, Mapping):
        return
    for name, key in MERGE_KEYS.items():
        yield from _unkeyed(pod, name, key, path)
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(_items(pod, kind)):
            here = f"{path}.{kind}[{index}]"
            yield from (problem for name, key in MERGE_KEYS.items() for problem in _unkeyed(container, name, key, here))


def _metadata_problems(metadata: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    for name in sorted(set(metadata) - {"labels", "annotations"}):
        yield FieldError(f"{path}.{name}", metadata[name], "only labels and annotations may be set")
    for kind in ("labels", "annotations"):
        given = metadata.get(kind, {})
        if not isinstance(given, Mapping):
            remedy = "must be an object of names and strings, or leave the field out"
            yield FieldError(f"{path}.{kind}", given, remedy)
            continue
        for name, value in given.items():
            if name in _TOPOLOGY:
                yield FieldError(f"{path}.{kind}.{name}", value, _TOPOLOGY_REMEDY)
            if str(name).startswith(_RESERVED_PREFIXES):
                yield FieldError(f"{path}.{kind}.{name}", value, _REMEDY_RESERVED)


def _spec_problems(base: Template, user: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    for name, remedy in _OWN_FIELD.items():
        # false is the default of all of them.
        if name in user and user[name] is not False:
            yield FieldError(f"{path}.{name}", user[name], remedy)
    yield from _grace_problems(base["terminationGracePeriodSeconds"], user, path)
    for name in ("volumes", "resourceClaims"):
        taken = {item["name"] for item in base.get(name, [])}
        for index, item in enumerate(_items(user, name)):
            if item.get("name") in taken:
                yield FieldError(f"{path}.{name}[{index}].name", item["name"], _REMEDY_RESERVED)
    yield from _container_problems(base["containers"][0], user, path)


def _container_problems(ray: Template, user: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    for index, container in enumerate(_items(user, "initContainers")):
        if container.get("name") in (ray["name"], _KUBERAY_INIT):
            yield FieldError(f"{path}.initContainers[{index}].name", container["name"], _REMEDY_RESERVED)
    for index, container in enumerate(_items(user, "containers")):
        here = f"{path}.containers[{index}]"
        if container.get("name") == ray["name"]:
            yield from _ray_container_problems(ray, container, here)


def _grace_problems(needed: int, user: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    """Yield a grace period that ends the preStop hook before the trainer has saved its checkpoint."""
    name = "terminationGracePeriodSeconds"
    given = user.get(name, needed)
    if not isinstance(given, int) or given < needed:
        remedy = f"spec.runPolicy.stopGracePeriodSeconds needs {needed} or more: lower it, or remove this field"
        yield FieldError(f"{path}.{name}", given, remedy)


def _ray_container_problems(base: Template, user: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    for name, remedy in _RAY_COMMAND.items():
        if name in user:
            yield FieldError(f"{path}.{name}", user[name], remedy)
    lifecycle = user.get("lifecycle")
    if isinstance(lifecycle, Mapping) and "preStop" in lifecycle:
        yield FieldError(f"{path}.lifecycle.preStop", lifecycle["preStop"], _HOOK_REMEDY)
    for index, variable in enumerate(_items(user, "env")):
        if variable.get("name") in RESERVED_ENV:
            yield FieldError(f"{path}.env[{index}].name", variable["name"], _REMEDY_RESERVED)
    taken = {folder(mount["mountPath"]) for mount in base["volumeMounts"]}
    for index, mount in enumerate(_items(user, "volumeMounts")):
        if folder(mount["mountPath"]) in taken:
            remedy = "the operator mounts a volume there: choose another path"
            yield FieldError(f"{path}.volumeMounts[{index}].mountPath", mount["mountPath"], remedy)


def _unkeyed(user: Mapping[str, Any], name: str, key: str, path: str) -> Iterator[FieldError]:
    value = user.get(name)
    if value is not None and not isinstance(value, list):
        yield FieldError(f"{path}.{name}", value, "must be a list")
    yield from unkeyed(value if isinstance(value, list) else [], key, f"{path}.{name}")


def unkeyed(items: Sequence[Any], key: str, path: str) -> Iterator[FieldError]:
    """Yield the items of a list at `path` that lack the key by which items are merged, or have one of a wrong type."""
    for index, item in enumerate(items):
        here = f"{path}[{index}]"
        if not isinstance(item, Mapping) or key not in item:
            yield FieldError(here, item, f"each item needs {key}, because items are merged by it")
        elif not is_merge_key(key, item[key]):
            kind = "an integer" if key in INTEGER_KEYS else "a string"
            # None is not shown by itself.
            shown = "null" if item[key] is None else item[key]
            yield FieldError(f"{here}.{key}", shown, f"must be {kind}, because items are merged by it")


def _items(user: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = user.get(name)
    return [item if isinstance(item, Mapping) else {} for item in value] if isinstance(value, list) else []
