"""The user's field for a field of a merged pod, in the words of the API server.

`reconcile/layout.py` calls it. A pod has the operator's items before the user's, so `containers[1]` of the pod may be
`containers[0]` of the user's podTemplate. An item is the user's if the podTemplate has one with the same merge key.
Items from other fields of the spec get those fields. Other paths are kept: what they name is the operator's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppojob_api.v1alpha1.merging import MERGE_KEYS, identity
from ppojob_api.v1alpha1.pools import Scheduling
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.plan import JobKey

_PATH = re.compile(r"\bspec\.(?:head|pools\[(?P<pool>\d+)\])\.podTemplate(?P<steps>(?:\.[A-Za-z]\w*|\[\d+\])+)")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def with_own_fields(words: str, spec: PPOJobSpec, key: JobKey, uid: str) -> str:
    """Return the words with the user's paths for those of the merged pods of a resolved spec."""
    if not _PATH.search(words):
        return words
    cluster = ray_cluster(spec, key, uid, "any")["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    owners: list[Scheduling] = [spec.head, *spec.pools]

    def field(found: re.Match[str]) -> str:
        number = 0 if found["pool"] is None else int(found["pool"]) + 1
        if number >= len(groups):
            return found[0]
        place = "spec.head" if number == 0 else f"spec.pools[{number - 1}]"
        steps = [int(index) if index else name for name, index in _STEP.findall(found["steps"])]
        pod = _Node(f"{place}.podTemplate", groups[number]["template"], owners[number].pod_template)
        return _field(pod, steps, list(_others(spec, owners[number], place))) or found[0]

    return _PATH.sub(field, words)


@dataclass(frozen=True)
class _Node:
    """A part of a merged pod, and what the user's podTemplate has there."""

    path: str
    merged: Any
    user: Any

    def field(self, name: str) -> "_Node":
        """Return the part below."""
        merged, user = (each.get(name) if isinstance(each, Mapping) else None for each in (self.merged, self.user))
        return _Node(f"{self.path}.{name}", merged, user)


def _others(spec: PPOJobSpec, owner: Scheduling, place: str) -> Iterator[tuple[str, str, Sequence[Any]]]:
    """Yield lists of the spec that become part of a pod: name in the pod, path in the spec, and items."""
    yield "tolerations", f"{place}.tolerations", owner.tolerations
    yield "imagePullSecrets", "spec.imagePullSecrets", spec.image_pull_secrets
    yield "env", "spec.env", [variable.to_wire() for variable in spec.env]
    yield "envFrom", "spec.envFrom", spec.env_from


def _field(node: _Node, steps: Sequence[str | int], others: Sequence[tuple[str, str, Sequence[Any]]]) -> str:
    """Return the path of the user's field. Empty: the user has none."""
    name, is_users = "", True
    for number, step in enumerate(steps):
        if isinstance(step, str):
            name, node = step, node.field(step)
            continue
        items = node.merged if isinstance(node.merged, list) else []
        if step >= len(items):
            return ""
        for kind, path, given in others:
            if kind == name and items[step] in given and _place_of(name, items, step, node.user) is None:
                return f"{path}[{given.index(items[step])}]{_shown(steps[number + 1 :])}"
        index = _place_of(name, items, step, node.user)
        is_users = is_users and index is not None
        node = _Node(f"{node.path}[{index}]", items[step], None if index is None else node.user[index])
    return node.path if is_users else ""


def _shown(steps: Sequence[str | int]) -> str:
    return "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in steps)


def _place_of(name: str, items: Sequence[Any], index: int, user: Any) -> int | None:
    """Return the place of a merged item in the user's list. None: it is not there."""
    key, given = MERGE_KEYS.get(name), user if isinstance(user, list) else []
    if key is None:
        # The user's items were appended, or replaced the list.
        place = index - (len(items) - len(given))
        return place if place >= 0 else None
    known = [identity(key, each.get(key)) for each in given if isinstance(each, Mapping)]
    wanted = identity(key, items[index].get(key)) if isinstance(items[index], Mapping) else None
    return known.index(wanted) if wanted is not None and wanted in known else None
