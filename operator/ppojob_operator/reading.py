"""Parses raw objects of the API server into the views that the policies read. Pure.

`loop.py`, the handlers and the webhook call it. It keeps what a policy needs and decides nothing, with two exceptions:
which of a pod's messages explains why it does not run, and which pool sizes of autoBalance are merged into the spec. An
edit of a pool's nodes, or turning autoBalance off, reverts those.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.layout import Layout, layout_of, with_elastic_bounds, with_layout
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.rules import check
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import EffectivePool, PPOJobStatus
from ppojob_api.v1alpha1.template_reference import PinnedTemplate, TemplateRef
from ppojob_api.v1alpha1.templates import capped, parse_with, pinned, reference
from ppojob_api.v1alpha1.validation import SpecError, parse_spec, with_queue
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Claim, Cluster, FetchJob, FetchPod, Job, JobKey, Manifest, Pod, Trouble, Workload

_PULL_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
_HARMLESS_WAITS = {"", "ContainerCreating", "PodInitializing"}
_SIGKILL_BY_KERNEL = "OOMKilled"
_LOST_NODES = {"DeletionByTaintManager", "DeletionByPodGC"}
"""Reasons of DisruptionTarget for a node that is lost or deleted."""
_RAY_CONTAINERS = {naming.HEAD_CONTAINER, naming.WORKER_CONTAINER}
_GENERATED_NAME = re.compile(r'pods "[^"]*" ')
_NO_DEVICES = "cannot allocate all claims"
"""The scheduler's message if no node has devices left for a pod's ResourceClaims."""
_EPOCH = datetime.fromtimestamp(0, UTC)


def parse_time(text: str | None) -> datetime:
    """Return the time of an RFC 3339 text; the epoch if there is none."""
    return datetime.fromisoformat(text) if text else _EPOCH


def read_job(raw: Manifest, template: Manifest | None = None) -> Job:
    """Return the view of a PPOJob. Unknown fields of the status, which a newer operator may write, are ignored.

    Args:
        raw: the PPOJob.
        template: the one that its spec names, for a job without one in its status. None: it is not known.

    Raises:
        pydantic.ValidationError: a known field of the status is invalid.
    """
    metadata, status = raw["metadata"], PPOJobStatus.model_validate(raw.get("status", {}), extra="ignore")
    given = raw.get("spec", {})
    ref, pin = _template(given, status, template)
    wire, spec = _read_spec(given, _queue(metadata, status), ref, pin)
    moved = status.effective_pools
    if isinstance(spec, PPOJobSpec):
        moved = moved_in_force(spec, moved)
        spec = with_moved(spec, moved)
    return Job(
        key=JobKey(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=spec,
        status=status,
        moved=tuple(moved),
        effective=_read_effective(wire, spec, status.effective_layout, pin),
        is_deleting="deletionTimestamp" in metadata,
        requested_owner=requested_owner(raw),
        retry_request=_annotations(raw).get(constants.ANNOTATION_RETRY, "")[: constants.MAX_REQUEST_LENGTH],
        queue_label=queue_label(metadata),
        template_ref=ref,
        template=pin,
        unknown=_unknown(raw),
    )


def requested_owner(raw: Manifest) -> str | None:
    """Return the value of the annotation that requests an operator; None: no annotation."""
    return _annotations(raw).get(constants.ANNOTATION_OPERATOR)


def _annotations(raw: Manifest) -> Mapping[str, str]:
    annotations: Mapping[str, str] = raw["metadata"].get("annotations") or {}
    return annotations


def queue_label(metadata: Mapping[str, Any]) -> str | None:
    """Return the queue in the label of an object; None: it has no such label."""
    labels = metadata.get("labels")
    return labels.get(constants.LABEL_QUEUE) if isinstance(labels, Mapping) else None


def _queue(metadata: Mapping[str, Any], status: PPOJobStatus) -> str | None:
    """Return the queue of a spec without queueName: before acceptance that of the label, then that in the status."""
    return status.queue_name if is_accepted(status) else queue_label(metadata)


def is_accepted(status: PPOJobStatus) -> bool:
    """Return whether the job is accepted now, so that the API server rejects changes of immutable fields."""
    return any((each.type, each.status) == (Condition.ACCEPTED, "True") for each in status.conditions)


def read_claim(raw: Manifest) -> Claim:
    """Return the view of a PersistentVolumeClaim."""
    status = raw.get("status", {})
    modes = status.get("accessModes") or raw.get("spec", {}).get("accessModes") or ()
    return Claim(name=raw["metadata"]["name"], phase=status.get("phase", "Pending"), access_modes=tuple(modes))


def read_cluster(raw: Manifest) -> Cluster:
    """Return the view of a RayCluster."""
    metadata, status = raw["metadata"], raw.get("status", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    # Not `status.state`, which stays "suspended" until all pods run again.
    suspended = conditions.get("RayClusterSuspended", {}).get("status") == "True"
    return Cluster(
        name=metadata["name"],
        is_deleting="deletionTimestamp" in metadata,
        is_suspended=suspended or raw.get("spec", {}).get("suspend") is True,
        created=parse_time(metadata.get("creationTimestamp")),
        problem=_cluster_problem(status, conditions),
        head_service=status.get("head", {}).get("serviceName", ""),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 1),
        spec=raw.get("spec", {}),
        created_from=metadata.get("annotations", {}).get(constants.ANNOTATION_MADE_OF),
        queue=queue_label(metadata),
        managed_by=raw.get("spec", {}).get("managedBy"),
    )


def read_workload(raw: Manifest) -> Workload:
    """Return the view of Kueue's Workload."""
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
        created_from=metadata.get("annotations", {}).get(constants.ANNOTATION_MADE_OF),
        created=parse_time(metadata.get("creationTimestamp")),
        is_deleting="deletionTimestamp" in metadata,
        is_suspended=raw.get("spec", {}).get("suspend") is True,
        queue=queue_label(metadata),
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


def _unknown(raw: Manifest) -> dict[str, Any]:
    """Return the fields of the operator's part of the status that this version does not know.

    Server-side apply deletes the fields that a field manager omits, so unknown ones must be written again. They are
    found by `managedFields`, because the reports' part must not become the operator's.
    """
    entries = (
        entry.get("fieldsV1", {}).get("f:status", {})
        for entry in raw["metadata"].get("managedFields", ())
        if (entry.get("manager"), entry.get("subresource")) == (constants.FIELD_MANAGER_OPERATOR, "status")
    )
    managed = {name.removeprefix("f:") for entry in entries for name in entry}
    known = {field.alias for field in PPOJobStatus.model_fields.values()}
    return {name: value for name, value in raw.get("status", {}).items() if name in managed - known}


def _template(
    spec: Mapping[str, Any], status: PPOJobStatus, found: Manifest | None
) -> tuple[TemplateRef | None, PinnedTemplate | None]:
    """Return the template that a job names, and the one that completes its spec.

    An accepted job keeps the one in its status, even if neither policy nor webhook refused an edit of the reference.
    """
    if is_accepted(status) or status.start_time is not None:
        return None if status.template is None else status.template.ref, status.template
    ref = reference(spec)
    return ref, None if ref is None or found is None else pinned(ref, found)


def _read_spec(
    raw: Mapping[str, Any], queue: str | None, ref: TemplateRef | None, template: PinnedTemplate | None
) -> tuple[Mapping[str, Any], PPOJobSpec | SpecError]:
    """Return the completed spec as it is on the wire, with the queue, and the resolved spec or what is wrong with it.

    A spec whose template is not known is not judged: `reconcile.templates` says that the template is missing.
    """
    try:
        raw = with_queue(raw, queue)
        if template is not None:
            wire, spec = parse_with(raw, template)
            return wire, spec if isinstance(spec, SpecError) else resolve(spec)
        return raw, SpecError([]) if ref is not None else resolve(parse_spec(raw))
    except SpecError as error:
        return raw, error


def _read_effective(
    raw: Mapping[str, Any], spec: PPOJobSpec | SpecError, layout: Layout | None, template: PinnedTemplate | None
) -> PPOJobSpec | None:
    """Return the completed spec with the effective layout instead of its layout. It respects the template's limits."""
    if layout is None:
        return None
    if isinstance(spec, PPOJobSpec) and layout_of(spec) == layout:
        return spec
    relaid = with_layout(raw, layout)
    relaid = with_layout(raw, layout)
    candidates = [relaid]
    if not raw.get("runPolicy", {}).get("queueName"):
        # Kueue evicts a RayCluster whose pods change. Elsewhere, KubeRay adds and deletes the pods of a running job.
        candidates.insert(0, with_elastic_bounds(relaid, raw))
    for wire in candidates:
        with contextlib.suppress(SpecError):
            return resolve(parse_spec(wire if template is None else capped(wire, template)))
    return None


def _cluster_problem(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return KubeRay's message, without the generated pod name, which differs in each try."""
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
    """Return InsufficientGPUs if an extended resource or device is missing, else Unschedulable."""
    limits = (c.get("resources", {}).get("limits", {}) for c in raw.get("spec", {}).get("containers", []))
    extended = {name for limit in limits for name in limit if "/" in name}
    lacking = _NO_DEVICES in words or any(f"Insufficient {name}" in words for name in extended)
    return Reason.INSUFFICIENT_GPUS if lacking else Reason.UNSCHEDULABLE


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


def with_nodes(spec: PPOJobSpec, nodes: Mapping[str, int]) -> PPOJobSpec:
    """Return the spec with these numbers of nodes, by pool."""
    pools = [pool.model_copy(update={"nodes": nodes.get(pool.name, pool.nodes)}) for pool in spec.pools]
    return spec.model_copy(update={"pools": pools})


def moved_in_force(spec: PPOJobSpec, moved: Sequence[EffectivePool]) -> list[EffectivePool]:
    """Return the resized pools that are still valid for the user's spec."""
    if not spec.auto_balance.enabled:
        return []
    written = {pool.name: pool for pool in spec.pools}
    return [each for each in moved if each.name in written and each.spec_nodes == written[each.name].nodes]


def with_moved(spec: PPOJobSpec, moved: Sequence[EffectivePool]) -> PPOJobSpec:
    """Return the user's spec with the resized pools, if that is valid."""
    if not moved:
        return spec
    other = with_nodes(spec, {each.name: each.nodes for each in moved})
    # Bounds and sizes may have been edited since.
    return spec if any(check(other)) else other
