"""Installs the operator with the chart, and waits for it with an eye on its pod: helm's own wait would not say why."""

from __future__ import annotations

from typing import Any

from tools.cluster.demo.pods import require_image, words
from tools.cluster.demo.target import OPERATOR_NAMESPACE, Target
from tools.cluster.errors import ClusterError
from tools.cluster.layout import PROJECT
from tools.cluster.waiting import wait_until

CHART = PROJECT / "charts" / "ppojob"
RELEASE = "ppojob"
READY_LIMIT_SECONDS = 240.0
# The first start may meet a certificate or a lease that is not there yet; a third start means that it cannot run.
ALLOWED_RESTARTS = 1
_IN_NAMESPACE = f"--namespace={OPERATOR_NAMESPACE}"


def install(target: Target, image: str) -> None:
    """`helm upgrade --install` with this image, until the new pod is ready.

    Raises:
        ClusterError: helm refuses, or the pod does not become ready; with the end of its log.
    """
    repository, _, tag = image.rpartition(":")
    if not repository or "/" in tag:
        raise ClusterError(f"OPERATOR_IMAGE {image!r} has no tag: write it as REPOSITORY:TAG")
    values = (f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=IfNotPresent")
    target.helm(
        *("upgrade", "--install", RELEASE, str(CHART), "--create-namespace"),
        *(f"--set-string={value}" for value in values),
        # One node has nowhere else to go to.
        "--set=replicas=1",
        # The definition may have come by `kubectl apply` before.
        "--take-ownership",
        limit=120,
    )
    wait_until("the operator", lambda: _missing(target), limit=READY_LIMIT_SECONDS, interval=1)


def _missing(target: Target) -> str:
    deployment = target.get("deployment", RELEASE, _IN_NAMESPACE)
    status = deployment["status"]
    is_seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
    wanted = deployment["spec"]["replicas"]
    if is_seen and status.get("availableReplicas", 0) == status.get("updatedReplicas", 0) == wanted:
        return ""
    labels = ",".join(f"{key}={value}" for key, value in deployment["spec"]["selector"]["matchLabels"].items())
    pods = target.get("pods", f"--selector={labels}", _IN_NAMESPACE)["items"]
    newest = max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), default=None)
    if newest is None:
        return f"a pod of deployment {OPERATOR_NAMESPACE}/{RELEASE}"
    _require_hope(target, newest)
    return words(newest)


def _require_hope(target: Target, pod: dict[str, Any]) -> None:
    require_image(pod, "OPERATOR_IMAGE")
    name = pod["metadata"]["name"]
    for container in pod["status"].get("containerStatuses", []):
        if container["restartCount"] > ALLOWED_RESTARTS:
            log = target.kubectl("logs", name, "--previous", "--tail=25", _IN_NAMESPACE)
            raise ClusterError(f"pod {name} ends again and again; the end of its log:\n{log}")
