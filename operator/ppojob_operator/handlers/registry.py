"""Kopf's event handlers. Each enqueues the affected job if `changes.py` finds a change, and does nothing else.

`watches.py` runs them. They are plain watches, so Kopf needs get, list and watch only, and writes no annotations,
finalizers or Events.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import kopf

from ppojob_api.v1alpha1 import constants
from ppojob_operator.handlers.changes import Changes, cluster_view, fetch_job_view, job_view, pod_view
from ppojob_operator.plan import JobKey
from ppojob_operator.settings import Settings

Enqueue = Callable[[JobKey], object]
View = Callable[[Mapping[str, Any]], Hashable]

_OBJECTS_AT_ONCE = 200
_IDLE_SECONDS = 0.2

_NAMESPACES = ("", "v1", "namespaces")
_VIEWS: Mapping[tuple[str, str, str], View] = {
    ("ray.io", "v1", "rayclusters"): cluster_view,
    ("batch", "v1", "jobs"): fetch_job_view,
    ("", "v1", "pods"): pod_view,
}
"""Group, version and plural of the objects that belong to jobs, and the part of each that policies read."""


def registry(enqueue: Enqueue, namespaces_changed: Callable[[], object] | None = None) -> kopf.OperatorRegistry:
    """Return the handlers.

    Args:
        enqueue: called with the job of an event.
        namespaces_changed: called if a selected namespace changes, or is not selected any more. None: no namespace is
            watched, which would need a right.
    """
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    changes = Changes()

    # Coroutines, although they never wait: Kopf would run plain functions in threads, with a switch for each event.

    @kopf.on.event(constants.GROUP, constants.VERSION, constants.PLURAL, registry=handlers)
    async def job_changed(
        event: kopf.RawEvent, namespace: str | None, name: str | None, uid: str | None, **_: Any
    ) -> None:
        if changes.is_new(event["type"], uid or "", job_view(event["object"])):
            enqueue(JobKey(namespace or "", name or ""))

    for resource, view in _VIEWS.items():
        _watch_objects(handlers, changes, enqueue, resource, view)
    if namespaces_changed is not None:
        _watch_namespaces(handlers, namespaces_changed)
    return handlers


def _watch_objects(
    handlers: kopf.OperatorRegistry, changes: Changes, enqueue: Enqueue, resource: tuple[str, str, str], view: View
) -> None:
    @kopf.on.event(*resource, labels={constants.LABEL_JOB: kopf.PRESENT}, registry=handlers)
    async def object_changed(
        event: kopf.RawEvent, namespace: str | None, uid: str | None, labels: Mapping[str, str], **_: Any
    ) -> None:
        if changes.is_new(event["type"], uid or "", view(event["object"])):
            enqueue(JobKey(namespace or "", labels[constants.LABEL_JOB]))


def _watch_namespaces(handlers: kopf.OperatorRegistry, changed: Callable[[], object]) -> None:
    @kopf.on.event(*_NAMESPACES, registry=handlers)
    async def namespace_changed(**_: Any) -> None:
        changed()


class _NoDifferences(kopf.DiffBaseStorage):
    """Turns off Kopf's copies of previous objects: nothing reads them, and they take most of an event's time."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return nothing to compare."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        """Return no previous object."""

    def store(self, **_: Any) -> None:
        """Store nothing: the annotation would be a write."""


def kopf_settings(settings: Settings) -> kopf.OperatorSettings:
    """Return Kopf's settings: it watches the objects of jobs and posts no Events."""
    configured = kopf.OperatorSettings()
    configured.posting.enabled = False
    configured.persistence.diffbase_storage = _NoDifferences()
    configured.networking.request_timeout = settings.request_timeout
    # With tens of thousands of pods, list them in chunks, and end each one's task soon after its event.
    configured.watching.chunk_size = _OBJECTS_AT_ONCE
    configured.queueing.idle_timeout = _IDLE_SECONDS
    # The API server filters, so pods, Jobs and RayClusters of others are not sent.
    for resource in _VIEWS:
        configured.watching.label_selectors[resource] = constants.LABEL_JOB
    if settings.namespace_selector:
        # The API server reports a namespace as added or deleted if its labels begin or cease to match.
        configured.watching.label_selectors[_NAMESPACES] = str(settings.namespace_selector)
    # Limited to some namespaces, the operator may not read CustomResourceDefinitions and namespaces.
    configured.scanning.disabled = bool(settings.watch_namespaces)
    return configured
