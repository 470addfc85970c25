"""Why a pod of the demo does not run yet, in the kubelet's or the scheduler's words; whether waiting can help. Pure."""

from __future__ import annotations

from typing import Any

from tools.cluster.errors import ClusterError

# A first failure (ErrImagePull) may be the network's; after a second try the kubelet calls it a back-off.
_IMAGE_REASONS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


def words(pod: dict[str, Any]) -> str:
    """The pod's phase, what its containers wait for, and its conditions that are not met."""
    status = pod["status"]
    said = [f"{item.get('reason', '')} {item.get('message', '')}".strip() for item in _waiting(pod)]
    unmet = [item.get("message", "") for item in status.get("conditions", []) if item["status"] == "False"]
    reasons = "; ".join(dict.fromkeys(filter(None, [*said, *unmet])))
    return f"pod {pod['metadata']['name']} is {status['phase']}" + (f": {reasons}" if reasons else "")


def require_image(pod: dict[str, Any], setting: str) -> None:
    """Refuse a pod whose image cannot be pulled.

    Raises:
        ClusterError: names the image, the kubelet's words, and `setting`, which gave the image.
    """
    for item in _waiting(pod):
        if item.get("reason") not in _IMAGE_REASONS:
            continue
        images = ", ".join(container["image"] for container in pod["spec"]["containers"])
        node = pod["spec"].get("nodeName", "its node")
        raise ClusterError(
            f"pod {pod['metadata']['name']}: {node} cannot pull the image {images} "
            f"({item['reason']}: {item.get('message', '')}). Push it to a registry that the nodes reach, "
            f"and name it in {setting}; a registry's login belongs to the nodes or to the namespace's service accounts"
        )


def _waiting(pod: dict[str, Any]) -> list[dict[str, Any]]:
    states = [container["state"].get("waiting") for container in pod["status"].get("containerStatuses", [])]
    return [state for state in states if state]
