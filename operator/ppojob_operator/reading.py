"""Parses raw objects of the API server into the views that the policies read. Pure.

`loop.py`, the handlers and the webhook call it. It keeps what a policy needs and decides nothing, with one exception:
which pool sizes of autoBalance are merged into the spec. An edit of a pool's nodes, or turning autoBalance off, reverts
those. `reading_pods.py` parses pods.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition
from ppojob_api.v1alpha1.layout import Layout, layout_of, with_elastic_bounds, with_layout
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.rules import check
from ppojob_api.v1alpha1.runtime import RunPolicy
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.status import EffectivePool, PPOJobStatus
from ppojob_api.v1alpha1.template_reference import PinnedTemplate, TemplateRef
from ppojob_api.v1alpha1.templates import capped, parse_with, pinned, reference
from ppojob_api.v1alpha1.validation import SpecError, parse_spec, with_queue
from ppojob_operator.plan import Claim, Cluster, FetchJob, Job, JobKey, Manifest, Workload
from ppojob_operator.times import parse_time

_TTL = "ttlSecondsAfterFinished"
_EFFECTIVE_LAYOUT = "effectiveLayout"
_GENERATED_NAME = re.compile(r'pods "[^"]*" ')


def read_job(raw: Manifest, template: Manifest | None = None) -> Job:
    """Return the view of a PPOJob. Unknown fields of the status, which a newer operator may write, are ignored.

    Args:
        raw: the PPOJob.
        template: the one that its spec names, for a job without one in its status. None: it is not known.

    Raises:
        pydantic.ValidationError: a known field of the status is invalid.
    """
    bare = read_without_spec(raw)
    metadata, status = raw["metadata"], bare.status
    given = raw.get("spec", {})
    ref, pin = _template(given, status, template)
    wire, spec = _read_spec(given, _queue(metadata, status), ref, pin, is_accepted=_was_accepted(status))
    moved = status.effective_pools
    if isinstance(spec, PPOJobSpec):
        moved = moved_in_force(spec, moved)
        spec = with_moved(spec, moved)
    return replace(
        bare,
        spec=spec,
        moved=tuple(moved),
        effective=_read_effective(wire, spec, status.effective_layout, pin),
        template_ref=ref,
        template=pin,
        ttl_seconds_after_finished=_ttl(wire),
    )


def read_without_spec(raw: Manifest) -> Job:
    """Return the view of a PPOJob without its spec, for a job whose spec the operator cannot read.

    Raises:
        pydantic.ValidationError: a known field of the status is invalid.
    """
    metadata = raw["metadata"]
    return Job(
        key=JobKey(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=SpecError([]),
        status=_read_status(raw),
        is_deleting="deletionTimestamp" in metadata,
        requested_owner=requested_owner(raw),
        retry_request=_annotations(raw).get(constants.ANNOTATION_RETRY, "")[: constants.MAX_REQUEST_LENGTH],
        adopted_uid=_annotations(raw).get(constants.ANNOTATION_ADOPT, "")[: constants.MAX_REQUEST_LENGTH] or None,
        queue_label=queue_label(metadata),
        unknown=_unknown(raw),
    )


def _read_status(raw: Manifest) -> PPOJobStatus:
    """Return the status. That of a job that has ended is read without its layout if another version has written that:
    nothing runs in it any more, and the rest says when the job is deleted.
    """
    wire = raw.get("status", {})
    try:
        return PPOJobStatus.model_validate(wire, extra="ignore")
    except ValidationError as error:
        is_of_layout = {each["loc"][0] for each in error.errors()} == {_EFFECTIVE_LAYOUT}
        if not is_of_layout or finished_condition(raw) is None:
            raise
        rest = {name: value for name, value in wire.items() if name != _EFFECTIVE_LAYOUT}
        return PPOJobStatus.model_validate(rest, extra="ignore")


def finished_condition(raw: Manifest) -> str | None:
    """Return Complete or Failed if the job is over, else None."""
    over = (Condition.COMPLETE, Condition.FAILED)
    conditions = raw.get("status", {}).get("conditions", [])
    return next((each["type"] for each in conditions if each["type"] in over and each["status"] == "True"), None)


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


def _was_accepted(status: PPOJobStatus) -> bool:
    return is_accepted(status) or status.start_time is not None


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
    if _was_accepted(status):
        return None if status.template is None else status.template.ref, status.template
    ref = reference(spec)
    return ref, None if ref is None or found is None else pinned(ref, found)


def _read_spec(
    raw: Mapping[str, Any],
    queue: str | None,
    ref: TemplateRef | None,
    template: PinnedTemplate | None,
    *,
    is_accepted: bool,
) -> tuple[Mapping[str, Any], PPOJobSpec | SpecError]:
    """Return the completed spec as it is on the wire, with the queue, and the resolved spec or what is wrong with it.

    A spec whose template is not known is not judged: `reconcile.templates` says that the template is missing.
    """
    try:
        raw = with_queue(raw, queue)
        if template is not None:
            wire, spec = parse_with(raw, template, is_accepted=is_accepted)
            return wire, spec if isinstance(spec, SpecError) else resolve(spec)
        return raw, SpecError([]) if ref is not None else resolve(parse_spec(raw, is_accepted=is_accepted))
    except SpecError as error:
        return raw, error


def _ttl(wire: Mapping[str, Any]) -> int | None:
    """Return ttlSecondsAfterFinished of a spec that may be invalid. None: it has none, or an invalid one."""
    # An API server sends no spec that is not an object, but the webhook reads what anybody sends.
    policy = wire.get("runPolicy") if isinstance(wire, Mapping) else None
    given = {name: policy[name] for name in (_TTL,) if name in policy} if isinstance(policy, Mapping) else {}
    try:
        return RunPolicy.model_validate(given).ttl_seconds_after_finished
    except ValidationError:
        return None


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
            return resolve(parse_spec(wire if template is None else capped(wire, template), is_accepted=True))
    return None


def _cluster_problem(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return KubeRay's message, without the generated pod name, which differs in each try."""
    failure = conditions.get("ReplicaFailure", {})
    words = str(status.get("reason", "")) if status.get("state") == "failed" else ""
    if failure.get("status") == "True":
        words = str(failure.get("message", ""))
    return _GENERATED_NAME.sub("", " ".join(words.split()))


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
