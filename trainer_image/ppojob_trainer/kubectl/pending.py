"""Explains why a job does not run yet, pool by pool, with the messages of scheduler, kubelet and KubeRay. Pure.

`app.py` calls it with the job's objects from the API server. It reports only what they say.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from ppojob_api.v1alpha1 import constants
from ppojob_trainer.kubectl.client import Raw
from ppojob_trainer.kubectl.status_table import age, is_finished, missing_operator

_HEAD = "head"
_MAX_EVENTS = 3
_BEFORE_THE_PODS = {
    constants.Condition.ACCEPTED: ("False", "Unknown"),
    constants.Condition.SOURCES_FETCHED: ("False",),
    # Unknown: it runs without the queue.
    constants.Condition.ADMITTED: ("False",),
}
"""Conditions that a job may wait for before it has pods, with the statuses that mean waiting."""
_HARMLESS = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class JobSnapshot:
    """The objects of a job from the API server."""

    job: Raw
    clusters: Sequence[Raw]
    """RayClusters of the job."""
    pods: Sequence[Raw]
    """Its pods."""
    events: Sequence[Raw]
    """All Events of the namespace."""
    now: datetime


def explain(snapshot: JobSnapshot) -> list[str]:
    """Return the lines of the explanation; an indented line belongs to the line above."""
    status = snapshot.job.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", [])}
    name, waited = (
        snapshot.job["metadata"]["name"],
        age(snapshot.job["metadata"].get("creationTimestamp"), snapshot.now),
    )
    lines = [f"{name}: {status.get('phase', 'Pending')}, {waited} old"]
    if problem := missing_operator(snapshot.job):
        return [*lines, f"  {problem}"]
    if is_finished(snapshot.job):
        return [*lines, "  the job has ended: see kubectl ppo status"]
    for kind, is_waiting in _BEFORE_THE_PODS.items():
        if kind in conditions and conditions[kind]["status"] in is_waiting:
            return [*lines, f"  {conditions[kind]['reason']}: {conditions[kind]['message']}"]
    pools_ready = conditions.get(constants.Condition.POOLS_READY)
    if pools_ready is not None and pools_ready["status"] == "True":
        return [*lines, "  all pods are ready", *_after_the_pods(conditions)]
    if pools_ready is not None:
        lines.append(f"  {pools_ready['reason']}: {pools_ready['message']}")
    return [*lines, *_clusters(snapshot), *_groups(snapshot)]


def _after_the_pods(conditions: dict[str, Raw]) -> Iterator[str]:
    for kind in (constants.Condition.SUBMITTED, constants.Condition.PROGRESSING):
        if kind in conditions:
            each = conditions[kind]
            yield f"  {kind} {each['status']}: {each['reason']}: {each['message']}"


def _clusters(snapshot: JobSnapshot) -> Iterator[str]:
    """Report KubeRay's state of the job's RayClusters."""
    if not snapshot.clusters:
        yield "RayCluster: not created yet"
    for cluster in snapshot.clusters:
        status, metadata = cluster.get("status", {}), cluster["metadata"]
        state = "being deleted" if "deletionTimestamp" in metadata else status.get("state") or "not ready yet"
        yield f"RayCluster {metadata['name']}: {state}"
        if cluster.get("spec", {}).get("suspend"):
            yield "  suspended (spec.suspend is true): a queue has not admitted it, or a user has suspended it"
        if status.get("reason"):
            yield f"  KubeRay: {status['reason']}"
        for each in status.get("conditions", []):
            if each["type"] == "ReplicaFailure" and each["status"] == "True":
                yield f"  KubeRay: {each['reason']}: {each['message']}"
        yield from _events(snapshot, {metadata["uid"]})


def _groups(snapshot: JobSnapshot) -> Iterator[str]:
    """Report what the pods of the head and of each pool wait for."""
    wanted = {_HEAD: 1} | {
        pool["name"]: pool.get("desiredNodes", 0) for pool in snapshot.job.get("status", {}).get("pools", [])
    }
    for group, count in wanted.items():
        pods = [pod for pod in snapshot.pods if _group(pod) == group]
        num_ready = sum(_is_ready(pod) for pod in pods)
        title = "head" if group == _HEAD else f"pool {group}"
        yield f"{title}: {num_ready} of {count} pods ready, {len(pods)} created"
        words = Counter(words for pod in pods if not _is_ready(pod) for words in _words(pod))
        for said, number in words.items():
            yield f"  {said}{f' ({number} pods)' if number > 1 else ''}"
        yield from _events(snapshot, {pod["metadata"]["uid"] for pod in pods if not _is_ready(pod)})


def _group(pod: Raw) -> str:
    labels = pod["metadata"].get("labels", {})
    return str(labels.get(constants.LABEL_POOL) or labels.get(constants.LABEL_TASK) or _HEAD)


def _is_ready(pod: Raw) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _words(pod: Raw) -> Iterator[str]:
    status = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"]:
        yield "is being deleted"
    for each in status.get("conditions", []):
        if each["type"] == "PodScheduled" and each["status"] == "False":
            yield f"scheduler: {each.get('message') or each.get('reason', '')}"
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting, ended = container.get("state", {}).get("waiting"), container.get("state", {}).get("terminated")
        if waiting and waiting.get("reason") not in _HARMLESS:
            yield f"kubelet: {container['name']}: {waiting.get('reason')}: {waiting.get('message', '')}".rstrip(": ")
        if ended and ended.get("exitCode"):
            reason = ended.get("reason", "Error")
            yield f"kubelet: {container['name']} ended: {reason}, exit code {ended['exitCode']}"


def _events(snapshot: JobSnapshot, uids: set[str]) -> Iterator[str]:
    """Report the newest warnings about some objects; equal messages are counted."""
    found: dict[str, tuple[str, int]] = {}
    for event in snapshot.events:
        if event.get("type") != "Warning" or event.get("involvedObject", {}).get("uid") not in uids:
            continue
        words = f"{event.get('reason', '')}: {' '.join(event.get('message', '').split())}"
        time, count = found.get(words, ("", 0))
        found[words] = (max(time, _time(event)), count + (event.get("count") or 1))
    newest = sorted(found.items(), key=lambda item: item[1][0], reverse=True)
    for words, (time, count) in newest[:_MAX_EVENTS]:
        yield f"  Event, {count} x, last {age(time or None, snapshot.now)} ago: {words}"


def _time(event: Raw) -> str:
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((str(time) for time in times if time), "")
