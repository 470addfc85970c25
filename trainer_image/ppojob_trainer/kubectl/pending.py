"""Explains why a job does not run yet, pool by pool, with the messages of scheduler, kubelet and KubeRay. Pure.

`app.py` calls it with the job's objects from the API server. It adds no guesses.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from ppojob_api.v1alpha1 import constants
from ppojob_trainer.kubectl.client import Raw
from ppojob_trainer.kubectl.status_table import age, is_finished

_HEAD = "head"
_MAX_EVENTS = 3
_BEFORE_THE_PODS = {
    constants.Condition.ACCEPTED: ("False", "Unknown"),
    constants.Condition.SOURCES_FETCHED: ("False",),
    # Unknown: it runs without the queue.
    constants.Condition.ADMITTED: ("False",),
}
"""What a job may wait for before there is a pod to ask, and with which status it does."""
_HARMLESS = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class Sight:
    """The objects of a job from the API server."""

    job: Raw
    clusters: Sequence[Raw]
    """RayClusters of the job."""
    pods: Sequence[Raw]
    """Its pods."""
    events: Sequence[Raw]
    """Events of the namespace, about whatever."""
    now: datetime


def explain(sight: Sight) -> list[str]:
    """Return the explanation, a line each; what is indented belongs to the line above."""
    status = sight.job.get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", [])}
    name, waited = sight.job["metadata"]["name"], age(sight.job["metadata"].get("creationTimestamp"), sight.now)
    lines = [f"{name}: {status.get('phase', 'Pending')}, {waited} old"]
    if not conditions:
        return [
            *lines,
            "  no operator has looked at it yet: is ppojob-operator running, and does it watch this namespace?",
        ]
    if is_finished(sight.job):
        return [*lines, "  it has ended: see kubectl ppo status"]
    for kind, is_waiting in _BEFORE_THE_PODS.items():
        if kind in conditions and conditions[kind]["status"] in is_waiting:
            return [*lines, f"  {conditions[kind]['reason']}: {conditions[kind]['message']}"]
    pools_ready = conditions.get(constants.Condition.POOLS_READY)
    if pools_ready is not None and pools_ready["status"] == "True":
        return [*lines, "  all pods are ready", *_after_the_pods(conditions)]
    if pools_ready is not None:
        lines.append(f"  {pools_ready['reason']}: {pools_ready['message']}")
    return [*lines, *_clusters(sight), *_groups(sight)]


def _after_the_pods(conditions: dict[str, Raw]) -> Iterator[str]:
    for kind in (constants.Condition.SUBMITTED, constants.Condition.PROGRESSING):
        if kind in conditions:
            each = conditions[kind]
            yield f"  {kind} {each['status']}: {each['reason']}: {each['message']}"


def _clusters(sight: Sight) -> Iterator[str]:
    """Say what KubeRay says of the job's RayClusters."""
    if not sight.clusters:
        yield "RayCluster: there is none yet"
    for cluster in sight.clusters:
        status, metadata = cluster.get("status", {}), cluster["metadata"]
        state = "being deleted" if "deletionTimestamp" in metadata else status.get("state") or "not ready yet"
        yield f"RayCluster {metadata['name']}: {state}"
        if cluster.get("spec", {}).get("suspend"):
            yield "  it is suspended (spec.suspend): its queue or somebody holds it back"
        if status.get("reason"):
            yield f"  KubeRay: {status['reason']}"
        for each in status.get("conditions", []):
            if each["type"] == "ReplicaFailure" and each["status"] == "True":
                yield f"  KubeRay: {each['reason']}: {each['message']}"
        yield from _events(sight, {metadata["uid"]})


def _groups(sight: Sight) -> Iterator[str]:
    """Say of the head and of each pool what its pods wait for."""
    wanted = {_HEAD: 1} | {
        pool["name"]: pool.get("desiredNodes", 0) for pool in sight.job.get("status", {}).get("pools", [])
    }
    for group, count in wanted.items():
        pods = [pod for pod in sight.pods if _group(pod) == group]
        num_ready = sum(_is_ready(pod) for pod in pods)
        title = "head" if group == _HEAD else f"pool {group}"
        yield f"{title}: {num_ready} of {count} pods ready, {len(pods)} there"
        words = Counter(words for pod in pods if not _is_ready(pod) for words in _words(pod))
        for said, number in words.items():
            yield f"  {said}{f' ({number} pods)' if number > 1 else ''}"
        yield from _events(sight, {pod["metadata"]["uid"] for pod in pods if not _is_ready(pod)})


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


def _events(sight: Sight, uids: set[str]) -> Iterator[str]:
    """Say the newest warnings about some objects; the same words about several are said once."""
    found: dict[str, tuple[str, int]] = {}
    for event in sight.events:
        if event.get("type") != "Warning" or event.get("involvedObject", {}).get("uid") not in uids:
            continue
        words = f"{event.get('reason', '')}: {' '.join(event.get('message', '').split())}"
        time, count = found.get(words, ("", 0))
        found[words] = (max(time, _time(event)), count + (event.get("count") or 1))
    newest = sorted(found.items(), key=lambda item: item[1][0], reverse=True)
    for words, (time, count) in newest[:_MAX_EVENTS]:
        yield f"  Event, {count} x, last {age(time or None, sight.now)} ago: {words}"


def _time(event: Raw) -> str:
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((str(time) for time in times if time), "")
