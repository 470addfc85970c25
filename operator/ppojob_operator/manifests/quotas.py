"""What a namespace never allows, however much of it is free: the API server's words, with the field of the PPOJob.

`trials.py` calls it before a running job is stopped, `reconcile/pods.py` when KubeRay cannot create pods. An exceeded
ResourceQuota usually says nothing about a later request, because other pods end. But if the pods of a group, which run
at the same time, ask for more than the quota allows in all, they can never run. Pods of several groups are not added
up: a quota with a scope may be about some of them only. A LimitRange is about single pods.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ppojob_api.v1alpha1.quantities import parse_quantity

EXCEEDED = "exceeded quota"
_QUOTA = re.compile(r"exceeded quota: (\S+), requested: (\S+), used: \S+, limited: (\S+)")
_LIMIT_RANGE = re.compile(r"m(?:ax|in)imum (\S+) usage per (?:Container|Pod) is \S+, but (?:limit|request) is (\w+)")
_NAMESPACE = "metadata.namespace"
_PODS = ("pods", "count/pods")
_HEAD = "spec.head"
_HEAD_FAILED = "FailedCreateHeadPod"


@dataclass(frozen=True)
class Group:
    """A group of a RayCluster: the head, or the pods of a pool."""

    path: str
    """Path of the head or the pool in the PPOJob."""
    needed: int
    """Pods that run at the same time. 0: the job runs without them."""
    template: Mapping[str, Any]

    def amounts(self, resource: str) -> tuple[Decimal, ...]:
        """Return how much of a resource, as a quota names it, Ray's container and the whole pod ask for."""
        givens = [each["limits"] if resource.startswith("limits.") else each["all"] for each in self._resources]
        found = [_number(str(given.get(_name(resource), "0"))) or Decimal(0) for given in givens]
        return *found[:1], sum(found, Decimal(0))

    def field(self, resource: str) -> str:
        """Return the field of the PPOJob that decides how much of a resource a pod asks for."""
        name = _name(resource)
        if name in _PODS:
            return _NAMESPACE if self.needed < 2 else f"{self.path}.nodes"
        if name in ("cpu", "memory"):
            return f"{self.path}.{'resources' if self.path == _HEAD else 'resourcesPerGPU'}.{name}"
        devices = [each for each in self._resources[0]["limits"] if "/" in each] if self._resources else []
        if name not in devices or self.path == _HEAD:
            return f"{self.path}.podTemplate"
        # GPUs come before network devices.
        return f"{self.path}.{'gpusPerNode' if name == devices[0] else 'network.rdma.count'}"

    @property
    def _resources(self) -> list[dict[str, Mapping[str, Any]]]:
        """Limits of each container, and its requests, of which a limit is the default."""
        found = [each.get("resources", {}) for each in self.template.get("spec", {}).get("containers", [])]
        limits = [each.get("limits", {}) for each in found]
        return [
            {"limits": each, "all": each | given.get("requests", {})} for each, given in zip(limits, found, strict=True)
        ]


def groups_of(spec: Mapping[str, Any]) -> tuple[Group, ...]:
    """Return the groups of a RayCluster's spec, the head first."""
    head, workers = spec.get("headGroupSpec", {}), spec.get("workerGroupSpecs", [])
    pools = (
        Group(f"spec.pools[{index}]", each.get("minReplicas", 0), each.get("template", {}))
        for index, each in enumerate(workers)
    )
    return (Group(_HEAD, 1, head.get("template", {})), *pools)


def excess(words: str, groups: Sequence[Group]) -> str:
    """Return what a quota can never allow; empty: nothing, or the words are not about a quota.

    Args:
        words: of the API server, or of KubeRay, which repeats them.
        groups: those of which a pod may have been refused. None: the RayCluster was.
    """
    found: list[str] = []
    for quota, requested, limited in _QUOTA.findall(words):
        asked, allowed = _amounts(requested), _amounts(limited)
        for resource in sorted(asked.keys() & allowed.keys()):
            found += _excess(quota, resource, asked[resource], allowed[resource], groups)
    return "; ".join(found)


def excess_of_cluster(words: str, spec: Mapping[str, Any]) -> str:
    """Return the same for KubeRay's words about the pods of a RayCluster, which name no group."""
    head, *pools = groups_of(spec)
    return excess(words, [head] if _HEAD_FAILED in words else pools) if pools else ""


def with_field(words: str, group: Group) -> str:
    """Return the words of a LimitRange with the field that exceeds it; others unchanged."""
    found = _LIMIT_RANGE.search(words)
    if found is None or _number(found[2]) not in group.amounts(found[1]):
        return words
    return f"{group.field(found[1])}: {words}: change it, or the LimitRange of the namespace"


def _excess(quota: str, resource: str, asked: str, allowed: str, groups: Sequence[Group]) -> Iterator[str]:
    one, most = _number(asked), _number(allowed)
    if one is None or most is None:
        return
    # A message without a group is about those that ask for as much; no group: about the RayCluster.
    alike = [each for each in groups if len(groups) == 1 or resource in _PODS or one in each.amounts(resource)]
    places = [(each.field(resource), each.needed) for each in alike] or [("spec.pools" if groups else _NAMESPACE, 1)]
    if any(one * needed <= most for _, needed in places):
        # The words may be about this group, which runs as soon as others free the quota.
        return
    for path, needed in places:
        what = "object requests" if not groups else "pod requests" if needed == 1 else "pods request"
        each = f"{resource}={asked}" if needed == 1 else f"{resource}={asked} each"
        remedy = "create the job in another namespace" if path == _NAMESPACE else "lower this field"
        reason = f"{needed} {what} {each}, and quota {quota} allows {allowed} in all"
        yield f"{path}: {reason}: {remedy}, or raise the quota"


def _amounts(words: str) -> dict[str, str]:
    pairs = (each.partition("=") for each in words.rstrip(";,.]").split(","))
    return {name: value for name, _, value in pairs if value}


def _name(resource: str) -> str:
    """Return a pod's name of a resource for that of a quota."""
    return resource.removeprefix("requests.").removeprefix("limits.")


def _number(value: str) -> Decimal | None:
    """Return a quantity of the API server as a number. None: this operator does not read its unit."""
    try:
        return parse_quantity(value)
    except ValueError:
        return None
