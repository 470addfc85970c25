"""From raw objects of the API server to the views that the policies look at. Pure.

`loop.py` calls it. It keeps what a policy needs and refuses to judge, but for one thing: which of a pod's many
messages says why it does not run.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.layout import Layout, layout_of, with_layout
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import PPOJobStatus
from ppojob_api.v1alpha1.validation import SpecError, parse_spec
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Claim, Cluster, FetchJob, FetchPod, Job, JobKey, Manifest, Pod, Trouble, Workload
from ppojob_operator.reconcile import sizes

_PULL_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
_HARMLESS_WAITS = {"", "ContainerCreating", "PodInitializing"}
_SIGKILL_BY_KERNEL = "OOMKilled"
_LOST_NODES = {"DeletionByTaintManager", "DeletionByPodGC"}
"""Reasons of DisruptionTarget: the node was given up, or is gone."""
_RAY_CONTAINERS = {naming.HEAD_CONTAINER, naming.WORKER_CONTAINER}
_GENERATED_NAME = re.compile(r'pods "[^"]*" ')
_NO_DEVICES = "cannot allocate all claims"
"""The scheduler's words where no node has the devices of a pod's claims left."""
_EPOCH = datetime.fromtimestamp(0, UTC)


def parse_time(text: str | None) -> datetime:
    """Return the moment that an RFC 3339 text means; the epoch where there is none."""
    return datetime.fromisoformat(text) if text else _EPOCH


def read_job(raw: Manifest) -> Job:
    """Return the view of a PPOJob. Fields of the status that only a newer operator knows are no error.

    Raises:
        pydantic.ValidationError: the status is none of ours.
    """
    metadata, status = raw["metadata"], PPOJobStatus.model_validate(raw.get("status", {}), extra="ignore")
    spec, moved = _read_spec(raw.get("spec", {})), status.effective_pools
    if isinstance(spec, PPOJobSpec):
        moved = sizes.in_force(spec, moved)
        spec = sizes.with_moved(spec, moved)
    return Job(
        key=JobKey(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=spec,
        status=status,
        moved=tuple(moved),
        effective=_read_effective(raw.get("spec", {}), spec, status.effective_layout),
        is_going="deletionTimestamp" in metadata,
        operator_wish=operator_wish(raw),
        unknown=_unknown(raw),
    )


def operator_wish(raw: Manifest) -> str | None:
    """Return the value of the annotation that names the operator of a PPOJob; None: there is none."""
    annotations: Mapping[str, str] = raw["metadata"].get("annotations") or {}
    return annotations.get(constants.ANNOTATION_OPERATOR)


def read_claim(raw: Manifest) -> Claim:
    """Return the view of a PersistentVolumeClaim."""
    status = raw.get("status", {})
    modes = status.get("accessModes") or raw.get("spec", {}).get("accessModes") or ()
    return Claim(name=raw["metadata"]["name"], phase=status.get("phase", "Pending"), access_modes=tuple(modes))


def read_cluster(raw: Manifest) -> Cluster:
    """Return the view of a RayCluster."""
    metadata, status = raw["metadata"], raw.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    # `status.state` says "suspended" until all pods run again: it is no sign.
    suspended = conditions.get("RayClusterSuspended", {}).get("status") == "True"
    return Cluster(
        name=metadata["name"],
        is_going="deletionTimestamp" in metadata,
        is_suspended=suspended or raw.get("spec", {}).get("suspend") is True,
        created=parse_time(metadata.get("creationTimestamp")),
        problem=_cluster_problem(status, conditions),
        head_service=status.get("head", {}).get("serviceName", ""),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 1),
        spec=raw.get("spec", {}),
        made_of=metadata.get("annotations", {}).get(constants.ANNOTATION_MADE_OF),
    )


def read_workload(raw: Manifest) -> Workload:
    """Return the view of a Workload of Kueue."""
    metadata = raw["metadata"]
    conditions = {condition["type"]: condition for condition in raw.get("status", {}).get("conditions", [])}
    reserved, evicted = conditions.get("QuotaReserved", {}), conditions.get("Evicted", {})
    return Workload(
        owner=metadata.get("labels", {}).get(constants.LABEL_QUEUED_UID, ""),
        waits_for=str(reserved.get("message", "")) if reserved.get("status") == "False" else "",
        eviction=str(evicted.get("message", "")) if evicted.get("status") == "True" else "",
    )


def read_fetch_job(raw: Manifest) -> FetchJob:
    """Return the view of the Job that fetches models and data."""
    metadata = raw["metadata"]
    conditions = {condition["type"]: condition for condition in raw.get("status", {}).get("conditions", [])}
    complete, failed = conditions.get("Complete", {}), conditions.get("Failed", {})
    return FetchJob(
        made_of=metadata.get("annotations", {}).get(constants.ANNOTATION_MADE_OF),
        created=parse_time(metadata.get("creationTimestamp")),
        is_going="deletionTimestamp" in metadata,
        is_complete=complete.get("status") == "True",
        failure=str(failed.get("message", "")) if failed.get("status") == "True" else None,
    )


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
        words = str(ended[0].get("message", "")).strip() or _last_words(ended[0])
        starved = next(_out_of_memory(raw, "state"), None)
        return FetchPod(metadata["name"], pod.created, has_started, starved.words if starved else words)
    return FetchPod(metadata["name"], pod.created, has_started, trouble=pod.trouble.words if pod.trouble else "")


def read_pod(raw: Manifest) -> Pod:
    """Return the view of a Ray pod."""
    metadata, status = raw["metadata"], raw.get("status", {})
    labels = metadata.get("labels", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    return Pod(
        name=metadata["name"],
        cluster=labels.get(constants.LABEL_RAY_CLUSTER, ""),
        pool=labels.get(constants.LABEL_POOL),
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        is_going="deletionTimestamp" in metadata,
        address=status.get("podIP", ""),
        created=parse_time(metadata.get("creationTimestamp")),
        trouble=_pod_trouble(raw, conditions),
        out_of_memory=next(_killed_for_memory(raw), None),
        disruption=_disruption(status, conditions),
    )


def _unknown(raw: Manifest) -> dict[str, Any]:
    """Return the fields of the operator's part of the status that are none of ours.

    Written by server-side apply, our part is the whole of it: what is left out is deleted. The API server says who
    manages a field, since the reports' part must not become ours.
    """
    entries = (
        entry.get("fieldsV1", {}).get("f:status", {})
        for entry in raw["metadata"].get("managedFields", ())
        if (entry.get("manager"), entry.get("subresource")) == (constants.FIELD_MANAGER_OPERATOR, "status")
    )
    managed = {name.removeprefix("f:") for entry in entries for name in entry}
    known = {field.alias for field in PPOJobStatus.model_fields.values()}
    return {name: value for name, value in raw.get("status", {}).items() if name in managed - known}


def _read_spec(raw: Mapping[str, Any]) -> PPOJobSpec | SpecError:
    try:
        return resolve(parse_spec(raw))
    except SpecError as error:
        return error


def _read_effective(raw: Mapping[str, Any], spec: PPOJobSpec | SpecError, layout: Layout | None) -> PPOJobSpec | None:
    """Return the spec with the layout in force, whatever layout the spec itself has now."""
    if layout is None:
        return None
    if isinstance(spec, PPOJobSpec) and layout_of(spec) == layout:
        return spec
    relaid = _read_spec(with_layout(raw, layout))
    return relaid if isinstance(relaid, PPOJobSpec) else None


def _cluster_problem(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return KubeRay's words, without the names of pods that never were: each try has another."""
    failure = conditions.get("ReplicaFailure", {})
    words = str(status.get("reason", "")) if status.get("state") == "failed" else ""
    if failure.get("status") == "True":
        words = str(failure.get("message", ""))
    return _GENERATED_NAME.sub("", " ".join(words.split()))


def _pod_trouble(raw: Manifest, conditions: Mapping[str, Mapping[str, Any]]) -> Trouble | None:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        words = str(scheduled.get("message", ""))
        return Trouble(_scheduling_reason(raw, words), words)
    troubles = [*_out_of_memory(raw, "state"), *_container_troubles(raw.get("status", {}))]
    if troubles:
        return troubles[0]
    status = raw.get("status", {})
    if status.get("phase") == "Failed":
        words = f"{status.get('reason', '')}: {status.get('message', '')}".strip(": ") or "the pod failed"
        return Trouble(Reason.POD_FAILED, words)
    return None


def _scheduling_reason(raw: Manifest, words: str) -> str:
    """Tell a lack of GPUs, which has its own reason, from everything else that the scheduler may say."""
    limits = (c.get("resources", {}).get("limits", {}) for c in raw.get("spec", {}).get("containers", []))
    extended = {name for limit in limits for name in limit if "/" in name}
    lacking = _NO_DEVICES in words or any(f"Insufficient {name}" in words for name in extended)
    return Reason.INSUFFICIENT_GPUS if lacking else Reason.UNSCHEDULABLE


def _disruption(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> Trouble | None:
    """Return what the condition DisruptionTarget says, or that the pod's node does not answer."""
    target, ready = conditions.get("DisruptionTarget", {}), conditions.get("Ready", {})
    if target.get("status") == "True":
        reason = str(target.get("reason", ""))
        # The kubelet ends pods where its node is short of something, and where the node shuts down.
        is_node = reason in _LOST_NODES or (reason == "TerminationByKubelet" and status.get("reason") != "Evicted")
        words = f"{reason}: {target.get('message', '')}".rstrip(": ")
        return Trouble(Reason.NODE_LOST if is_node else Reason.PREEMPTED, words)
    # The kubelet gives a reason, or says not ready of containers too: without either it is the node's controller.
    are_containers_ready = conditions.get("ContainersReady", {}).get("status") == "True"
    if ready.get("status") == "False" and are_containers_ready and not ready.get("reason"):
        return Trouble(Reason.NODE_LOST, "its node does not answer")
    return None


def _killed_for_memory(raw: Manifest) -> Iterator[Trouble]:
    """Yield the containers that were killed for want of memory: now, or one of Ray's before it was started anew."""
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
            words = f"container {name} went beyond its memory limit{limit} and was killed"
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
            words = f"container {name} ended: {_last_words(terminated)}"
            yield Trouble(Reason.POD_FAILED, words, name, terminated["exitCode"])


def _last_words(terminated: Mapping[str, Any]) -> str:
    code = f"{terminated.get('reason', 'Error')}, exit code {terminated['exitCode']}"
    message = str(terminated.get("message", "")).strip()
    return f"{code}: {message}" if message else code
