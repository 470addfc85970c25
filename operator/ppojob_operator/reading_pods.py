"""Parses pods into the views that the policies read. Pure.

It decides one thing: which of a pod's messages explains why it does not run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Reason
from ppojob_operator.manifests import naming
from ppojob_operator.plan import FetchPod, Manifest, Pod, Trouble
from ppojob_operator.times import parse_time

_PULL_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
_HARMLESS_WAITS = {"", "ContainerCreating", "PodInitializing"}
_SIGKILL_BY_KERNEL = "OOMKilled"
_LOST_NODES = {"DeletionByTaintManager", "DeletionByPodGC"}
"""Reasons of DisruptionTarget for a node that is lost or deleted."""
_RAY_CONTAINERS = {naming.HEAD_CONTAINER, naming.WORKER_CONTAINER}
_NO_DEVICES = "cannot allocate all claims"
"""The scheduler's message if no node has devices left for a pod's ResourceClaims."""
_NO_VOLUME = "unbound immediate PersistentVolumeClaims"
"""The scheduler's message if a claim of the pod has no volume yet."""


def is_fetch_pod(raw: Manifest) -> bool:
    """Return whether a pod of the job fetches models and data, and is none of Ray's."""
    labels: Mapping[str, str] = raw["metadata"].get("labels", {})
    return labels.get(constants.LABEL_TASK) == constants.TASK_FETCH


def read_fetch_pod(raw: Manifest) -> FetchPod:
    """Return the view of a pod that fetches models and data."""
    metadata, pod = raw["metadata"], read_pod(raw)
    states = [container.get("state", {}) for container in _container_statuses(raw.get("status", {}))]
    ended = [state["terminated"] for state in states if state.get("terminated", {}).get("exitCode", 0) != 0]
    has_started = any("running" in state or "terminated" in state for state in states)
    if ended:
        words = str(ended[0].get("message", "")).strip() or _exit_message(ended[0])
        starved = next(_out_of_memory(raw, "state"), None)
        return FetchPod(metadata["name"], pod.created, has_started, starved.message if starved else words)
    trouble = pod.trouble or Trouble("", "")
    return FetchPod(
        metadata["name"],
        pod.created,
        has_started,
        trouble=trouble.message,
        has_image_trouble=trouble.reason == Reason.IMAGE_PULL_FAILED,
    )


def read_pod(raw: Manifest) -> Pod:
    """Return the view of a Ray pod."""
    metadata, status = raw["metadata"], raw.get("status", {})
    labels = metadata.get("labels", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    scheduled = conditions.get("PodScheduled", {})
    return Pod(
        name=metadata["name"],
        cluster=labels.get(constants.LABEL_RAY_CLUSTER, ""),
        pool=labels.get(constants.LABEL_POOL),
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        is_deleting="deletionTimestamp" in metadata,
        is_over=status.get("phase") in ("Succeeded", "Failed"),
        address=status.get("podIP", ""),
        node=raw.get("spec", {}).get("nodeName", ""),
        created=parse_time(metadata.get("creationTimestamp")),
        scheduled=parse_time(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None,
        trouble=_pod_trouble(raw, conditions),
        out_of_memory=next(_killed_for_memory(raw), None),
        disruption=_disruption(status, conditions),
    )


def _pod_trouble(raw: Manifest, conditions: Mapping[str, Mapping[str, Any]]) -> Trouble | None:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        words = str(scheduled.get("message", ""))
        return Trouble(_scheduling_reason(raw, words), f"{words}{_volume_remedy(raw, words)}")
    troubles = [*_out_of_memory(raw, "state"), *_container_troubles(raw.get("status", {}))]
    if troubles:
        return troubles[0]
    status = raw.get("status", {})
    if status.get("phase") == "Failed":
        words = f"{status.get('reason', '')}: {status.get('message', '')}".strip(": ") or "the pod failed"
        return Trouble(Reason.POD_FAILED, words)
    return None


def _scheduling_reason(raw: Manifest, words: str) -> str:
    """Return InsufficientGPUs if an extended resource or device is missing, else Unschedulable."""
    limits = (c.get("resources", {}).get("limits", {}) for c in raw.get("spec", {}).get("containers", []))
    extended = {name for limit in limits for name in limit if "/" in name}
    lacking = _NO_DEVICES in words or any(f"Insufficient {name}" in words for name in extended)
    return Reason.INSUFFICIENT_GPUS if lacking else Reason.UNSCHEDULABLE


def _volume_remedy(raw: Manifest, words: str) -> str:
    """Return where the reason is if a claim has no volume: the scheduler names neither the claim nor the reason."""
    if _NO_VOLUME not in words:
        return ""
    volumes = raw.get("spec", {}).get("volumes", [])
    claims = (volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume)
    command = " ".join(["kubectl describe pvc", *dict.fromkeys(claims)])
    return f"; `{command}` says why, for example because no StorageClass is the default one"


def _disruption(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> Trouble | None:
    """Return the pod's condition DisruptionTarget, or that its node does not respond."""
    target, ready = conditions.get("DisruptionTarget", {}), conditions.get("Ready", {})
    if target.get("status") == "True":
        reason = str(target.get("reason", ""))
        # The kubelet terminates pods under node pressure, and when the node shuts down.
        is_node = reason in _LOST_NODES or (reason == "TerminationByKubelet" and status.get("reason") != "Evicted")
        words = f"{reason}: {target.get('message', '')}".rstrip(": ")
        return Trouble(Reason.NODE_LOST if is_node else Reason.PREEMPTED, words)
    # The kubelet sets a reason or ContainersReady too; without them, the node controller wrote the condition.
    are_containers_ready = conditions.get("ContainersReady", {}).get("status") == "True"
    if ready.get("status") == "False" and are_containers_ready and not ready.get("reason"):
        return Trouble(Reason.NODE_LOST, "its node does not respond")
    return None


def _killed_for_memory(raw: Manifest) -> Iterator[Trouble]:
    """Yield the OOMKilled containers; for Ray's, the state before a restart counts too."""
    yield from _out_of_memory(raw, "state")
    yield from (trouble for trouble in _out_of_memory(raw, "lastState") if trouble.container in _RAY_CONTAINERS)


def _out_of_memory(raw: Manifest, state: str) -> Iterator[Trouble]:
    spec = raw.get("spec", {})
    limits = {
        container.get("name", ""): container.get("resources", {}).get("limits", {}).get("memory")
        for container in [*spec.get("initContainers", []), *spec.get("containers", [])]
    }
    for container in _container_statuses(raw.get("status", {})):
        name, terminated = container.get("name", ""), container.get(state, {}).get("terminated", {})
        if terminated.get("reason") == _SIGKILL_BY_KERNEL:
            limit = f" of {limits[name]}" if limits.get(name) else ""
            words = f"container {name} exceeded its memory limit{limit} and was terminated"
            yield Trouble(Reason.OUT_OF_MEMORY, words, name, terminated.get("exitCode"))


def _container_statuses(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _container_troubles(status: Mapping[str, Any]) -> Iterator[Trouble]:
    for container in _container_statuses(status):
        state, name = container.get("state", {}), container.get("name", "")
        waiting, terminated = state.get("waiting", {}), state.get("terminated", {})
        reason = waiting.get("reason", "")
        words = f"{reason}: {waiting.get('message', '')}".rstrip(": ")
        if reason in _PULL_REASONS:
            yield Trouble(Reason.IMAGE_PULL_FAILED, words, name)
        elif reason not in _HARMLESS_WAITS:
            yield Trouble(Reason.POD_FAILED, f"container {name}: {words}", name)
        if terminated.get("exitCode", 0) != 0:
            words = f"container {name} ended: {_exit_message(terminated)}"
            yield Trouble(Reason.POD_FAILED, words, name, terminated["exitCode"])


def _exit_message(terminated: Mapping[str, Any]) -> str:
    code = f"{terminated.get('reason', 'Error')}, exit code {terminated['exitCode']}"
    message = str(terminated.get("message", "")).strip()
    return f"{code}: {message}" if message else code
