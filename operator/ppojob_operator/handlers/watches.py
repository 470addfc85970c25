"""Runs Kopf in a separate thread with its own event loop. `leader_tasks.py` starts and stops it.

When Kopf ends, it cancels every task that was created after it in its event loop, which must not include reports in
progress. In a thread, it also installs no signal handlers. If a watch fails beyond Kopf's own retries, Kopf ends and is
restarted: it then lists all objects, so no change is missed.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import kopf

from ppojob_operator.api_server import ApiError, ApiRefused
from ppojob_operator.cluster import Cluster
from ppojob_operator.handlers.registry import Enqueue, kopf_settings, registry
from ppojob_operator.settings import Settings

logger = logging.getLogger(__name__)

_RESOURCE_SECONDS = 15.0
_CANCEL_SECONDS = 1.0
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
"""Pauses before Kopf is started again; one that has run for longer than this begins with the first one again."""


@dataclass(frozen=True)
class _Scope:
    """What Kopf can watch when it is started. Limited to some namespaces, it does not notice that this grows."""

    namespaces: frozenset[str] = frozenset()
    """Empty: all."""
    has_clusters: bool = True
    """Whether the API server serves RayClusters: KubeRay is installed."""
    refusals: Mapping[str, ApiRefused] = field(default_factory=dict)
    """Why the other namespaces cannot be watched: such a namespace, or the operator's Role in it, was deleted."""

    @property
    def is_whole(self) -> bool:
        return self.has_clusters and not self.refusals

    def has_more_than(self, other: "_Scope") -> bool:
        return self.has_clusters > other.has_clusters or bool(self.namespaces - other.namespaces)


class Watches:
    """Kopf in a separate thread with its own event loop."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        enqueue: Enqueue,
        namespaces_changed: Callable[[], None] = lambda: None,
        *,
        count_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`enqueue`, `namespaces_changed` and `count_failure` are called in the event loop that creates this object.

        Args:
            settings: of the operator.
            cluster: says which resources are served.
            enqueue: called with a job that has changed.
            namespaces_changed: called if a namespace begins or ceases to match the selector.
            count_failure: called each time that the watches fail.
        """
        self._settings = settings
        self._cluster = cluster
        self._count_failure = count_failure
        self._ready = threading.Event()
        ours = asyncio.get_running_loop()
        self._enqueue: Enqueue = lambda key: ours.call_soon_threadsafe(enqueue, key)
        self._namespaces_changed = lambda: ours.call_soon_threadsafe(namespaces_changed)

    @property
    def is_ready(self) -> bool:
        """Whether Kopf is watching."""
        return self._ready.is_set()

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set. If the watches fail, restart them.

        Limited to some namespaces, Kopf does not see new CRDs, so it is restarted when KubeRay is installed. A
        namespace that cannot be read would end Kopf, so the others are watched without it until it can be read again.
        """
        pause = 0.0
        while (scope := await self._await_scope(stop)) and not stop.is_set():
            for namespace, error in scope.refusals.items():
                logger.warning("namespace %s is not watched, because it cannot be read: %s", namespace, error)
            began = monotonic()
            problem = await self._watch_until(stop, scope)
            if problem is None:
                continue
            ran_long = monotonic() - began > _LONGEST_PAUSE
            pause = _FIRST_PAUSE if ran_long or not pause else min(2 * pause, _LONGEST_PAUSE)
            self._count_failure()
            logger.error("the watches failed and are restarted in %g s: %s", pause, problem)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)

    async def _watch_until(self, stop: asyncio.Event, scope: _Scope) -> str | None:
        """Run Kopf until `stop` is set or it could watch more; return the problem if Kopf ended early."""
        stopped = threading.Event()
        watching = asyncio.create_task(asyncio.to_thread(self._watch, scope, stopped), name="kopf")
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait())]
        if not scope.is_whole:
            ends.append(asyncio.create_task(self._await_more(scope)))
        try:
            await asyncio.wait([watching, *ends], return_when=asyncio.FIRST_COMPLETED)
            was_asked = not watching.done()
        finally:
            # Wait for the thread even if this is cancelled: a thread cannot be cancelled.
            stopped.set()
            for end in ends:
                end.cancel()
            await asyncio.wait([watching])
        error = watching.exception()
        if was_asked and error is None:
            return None
        return "Kopf ended without an error" if error is None else f"{type(error).__name__}: {error}"

    async def _await_scope(self, stop: asyncio.Event) -> _Scope | None:
        """Wait until the API server serves PPOJobs in one namespace at least; None if `stop` was set first."""
        while not stop.is_set():
            try:
                if scope := await self._find_scope():
                    return scope
                logger.warning("the API server does not serve PPOJobs: install the CustomResourceDefinition")
            except ApiError as error:
                logger.warning("the API server does not answer: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _RESOURCE_SECONDS)
        return None

    async def _find_scope(self) -> _Scope | None:
        """Return what can be watched; None if the API server does not serve PPOJobs.

        Raises:
            ApiError: nothing can be watched, or the API server does not answer.
        """
        watched = self._settings.watch_namespaces
        if not watched:
            return _Scope() if await self._cluster.serves_jobs("") else None
        refusals: dict[str, ApiRefused] = {}
        for namespace in watched:
            try:
                if not await self._cluster.serves_jobs(namespace):
                    return None
            except ApiRefused as error:
                refusals[namespace] = error
        found = [namespace for namespace in watched if namespace not in refusals]
        if not found:
            raise refusals[watched[0]]
        return _Scope(frozenset(found), await self._cluster.serves_clusters(found[0]), refusals)

    async def _await_more(self, scope: _Scope) -> None:
        has_more = False
        while not has_more:
            await asyncio.sleep(_RESOURCE_SECONDS)
            with contextlib.suppress(ApiError):
                found = await self._find_scope()
                has_more = found is not None and found.has_more_than(scope)

    def _watch(self, scope: _Scope, stopped: threading.Event) -> None:
        names = sorted(scope.namespaces)
        logger.info("watching PPOJobs, RayClusters, Jobs and pods in %s", ", ".join(names) or "all namespaces")
        where: dict[str, Any] = {"namespaces": names} if names else {"clusterwide": True}
        operator = kopf.operator(
            registry=registry(self._enqueue, self._namespaces_changed if self._settings.namespace_selector else None),
            settings=kopf_settings(self._settings),
            standalone=True,
            # Kopf's default needs a user name. The type of this argument, a str, is not public.
            identity=self._settings.pod_name,  # type: ignore[arg-type]
            stop_flag=stopped,
            ready_flag=self._ready,
            **where,
        )
        asyncio.run(_ended(operator, stopped))


async def _ended(operator: Coroutine[Any, Any, None], stopped: threading.Event) -> None:
    """Run Kopf. Without the event, the thread in which Kopf waits for it would keep this one from ending."""
    helper = asyncio.create_task(_cancel_again())
    try:
        await operator
    finally:
        helper.cancel()
        stopped.set()


async def _cancel_again() -> None:
    """Repeat the cancellation of Kopf's watchers until they end.

    A watcher that reconnects at that moment ignores it (`streaming_block` in Kopf 1.45). Kopf cancels it once and then
    waits forever, so the watches would neither end nor be restarted.
    """
    while True:
        await asyncio.sleep(_CANCEL_SECONDS)
        for task in asyncio.all_tasks():
            if task.cancelling() and task.get_name().startswith("watcher for "):
                task.cancel()
