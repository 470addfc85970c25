"""Kopf's functions: each notes which job needs a look, if `changes.py` finds something new, and does nothing else.

`watches.py` runs them. Only watches are used, so that Kopf needs get, list and watch and writes nothing: no
annotations, no finalizers, no Events of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import kopf

from ppojob_api.v1alpha1 import constants
from ppojob_operator.handlers.changes import Changes, cluster_view, fetch_job_view, job_view, pod_view
from ppojob_operator.plan import JobKey
from ppojob_operator.settings import Settings

Note = Callable[[JobKey], object]

_OBJECTS_AT_ONCE = 200
_IDLE_SECONDS = 0.2

_OF_A_JOB = {constants.LABEL_JOB: kopf.PRESENT}


def registry(note: Note) -> kopf.OperatorRegistry:
    """Return the handlers, which call `note` with the job that an event is about."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    changes = Changes()

    # Coroutines, though they wait for nothing: Kopf runs plain functions in threads, one hand-over for each event.

    @kopf.on.event(constants.GROUP, constants.VERSION, constants.PLURAL, registry=handlers)
    async def job_changed(
        event: kopf.RawEvent, namespace: str | None, name: str | None, uid: str | None, **_: Any
    ) -> None:
        if changes.is_new(event["type"], uid or "", job_view(event["object"])):
            note(JobKey(namespace or "", name or ""))

    @kopf.on.event("ray.io", "v1", "rayclusters", labels=_OF_A_JOB, registry=handlers)
    async def cluster_changed(
        event: kopf.RawEvent, namespace: str | None, uid: str | None, labels: Mapping[str, str], **_: Any
    ) -> None:
        if changes.is_new(event["type"], uid or "", cluster_view(event["object"])):
            note(JobKey(namespace or "", labels[constants.LABEL_JOB]))

    @kopf.on.event("batch", "v1", "jobs", labels=_OF_A_JOB, registry=handlers)
    async def fetch_job_changed(
        event: kopf.RawEvent, namespace: str | None, uid: str | None, labels: Mapping[str, str], **_: Any
    ) -> None:
        if changes.is_new(event["type"], uid or "", fetch_job_view(event["object"])):
            note(JobKey(namespace or "", labels[constants.LABEL_JOB]))

    @kopf.on.event("", "v1", "pods", labels=_OF_A_JOB, registry=handlers)
    async def pod_changed(
        event: kopf.RawEvent, namespace: str | None, uid: str | None, labels: Mapping[str, str], **_: Any
    ) -> None:
        if changes.is_new(event["type"], uid or "", pod_view(event["object"])):
            note(JobKey(namespace or "", labels[constants.LABEL_JOB]))

    return handlers


class _NoDifferences(kopf.DiffBaseStorage):
    """No memory of what objects were: nobody asks for it, and its copies take most of an event's time."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return nothing to compare."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        """Return that nothing is known."""

    def store(self, **_: Any) -> None:
        """Store nothing: the annotation would be a write."""


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """Return how Kopf is to behave: it watches what belongs to jobs, and posts nothing."""
    configured = kopf.OperatorSettings()
    configured.posting.enabled = False
    configured.persistence.diffbase_storage = _NoDifferences()
    configured.networking.request_timeout = settings.request_timeout
    # Tens of thousands of pods: neither all of them at once in memory, nor each for long after its event.
    configured.watching.chunk_size = _OBJECTS_AT_ONCE
    configured.queueing.idle_timeout = _IDLE_SECONDS
    # Filtered by the API server: pods, Jobs and RayClusters of others never come here.
    configured.watching.label_selectors["", "v1", "pods"] = constants.LABEL_JOB
    configured.watching.label_selectors["batch", "v1", "jobs"] = constants.LABEL_JOB
    configured.watching.label_selectors["ray.io", "v1", "rayclusters"] = constants.LABEL_JOB
    # In one namespace the operator has no right to see CustomResourceDefinitions and namespaces.
    configured.scanning.disabled = bool(settings.watch_namespace)
    return configured
