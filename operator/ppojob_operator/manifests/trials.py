"""What is tried on the API server before a running trainer is stopped for another RayCluster.

The RayCluster itself shows what its CRD and webhooks refuse. The CRD checks pod templates by types alone: KubeRay
creates the pods, and only then the API server says that a volume's name is used twice, or that the namespace allows no
such pod. So each pod template is also tried as a pod, which needs the right to create pods. That is no more than the
right to create RayClusters, whose pods may be any.
"""

import re
from dataclasses import dataclass

from ppojob_operator.manifests import quotas
from ppojob_operator.manifests.quotas import Group
from ppojob_operator.plan import Manifest

_NOT_A_REFUSAL = ("does not support dry run", "cannot create resource")
"""A webhook that knows no dry run may accept the object itself; and the operator may run before its Role is
upgraded."""
_BEFORE_REASON = re.compile(
    r'^.*?(?:Pod "[^"]*" is invalid: |pods "[^"]*" is forbidden: |cannot be handled as a Pod: )'
)
"""Name of a pod that does not exist, and what else comes before the reason in a message of the API server."""
_FIELD = re.compile(r"(?<![\w.\"'])(?=(?:spec|metadata)\.)")


@dataclass(frozen=True)
class Trial:
    """One object: a RayCluster to apply as a dry run, or a pod to create as one."""

    manifest: Manifest
    group: Group | None = None
    """The group of the pod. None: the object is the RayCluster."""

    def refusal(self, words: str) -> str:
        """Return the API server's message for the PPOJob's owner; empty: it says nothing about a later request."""
        if any(each in words for each in _NOT_A_REFUSAL):
            return ""
        if quotas.EXCEEDED in words:
            # The stopped RayCluster frees its quota.
            return quotas.excess(words, [] if self.group is None else [self.group])
        if self.group is None:
            return words
        reason = _BEFORE_REASON.sub("", words)
        if (found := quotas.with_field(reason, self.group)) != reason:
            return found
        template = f"{self.group.path}.podTemplate"
        found = _FIELD.sub(f"{template}.", reason)
        return found if found != reason else f"{template}: {reason}"


def trials(cluster: Manifest) -> tuple[Trial, ...]:
    """Return what to try for a RayCluster: itself, and a pod of its head and of each pool."""
    return (Trial(cluster), *(Trial(_pod(cluster, group), group) for group in quotas.groups_of(cluster["spec"])))


def _pod(cluster: Manifest, group: Group) -> Manifest:
    template, found = group.template, cluster["metadata"]
    # Policies may refuse pods without an owner. That of this one is the PPOJob: its RayCluster does not exist.
    of_cluster = {name: found[name] for name in ("namespace", "ownerReferences")}
    metadata = {**template["metadata"], **of_cluster, "generateName": f"{found['name']}-"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
