"""Kopf, running in a thread and an event loop of its own.

It has them because it cancels, when it ends, every younger task of the event loop that it runs in, reports in work
among them; in a thread it also leaves the process' signals alone.
"""

import asyncio
import contextlib
import logging
import threading
from typing import Any

import kopf

from ppojob_operator.api_server import ApiError
from ppojob_operator.cluster import Cluster
from ppojob_operator.handlers.registry import Note, kopf_settings, registry
from ppojob_operator.settings import Settings

logger = logging.getLogger(__name__)

_RESOURCE_SECONDS = 15.0


class Watches:
    """Kopf, in a thread and an event loop of its own."""

    def __init__(self, settings: Settings, cluster: Cluster, note: Note) -> None:
        """`note` is called in the event loop in which this object is made."""
        self._settings = settings
        self._cluster = cluster
        self._ready = threading.Event()
        ours = asyncio.get_running_loop()
        self._note: Note = lambda key: ours.call_soon_threadsafe(note, key)

    @property
    def is_ready(self) -> bool:
        """Whether Kopf has begun to watch."""
        return self._ready.is_set()

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set; ends earlier only if Kopf does.

        In one namespace Kopf may not see that a resource begins to be served: it is started anew when KubeRay comes.
        """
        while not stop.is_set():
            is_whole = await self._await_resources(stop)
            if stop.is_set():
                return
            if not await self._watch_until(stop, is_whole=is_whole):
                return

    async def _watch_until(self, stop: asyncio.Event, *, is_whole: bool) -> bool:
        """Let Kopf watch until `stop` is set or KubeRay has come; False if it ended by itself."""
        stopped = threading.Event()
        watching = asyncio.create_task(asyncio.to_thread(self._watch, stopped), name="kopf")
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait())]
        if not is_whole:
            ends.append(asyncio.create_task(self._await_kuberay()))
        try:
            await asyncio.wait([watching, *ends], return_when=asyncio.FIRST_COMPLETED)
            was_asked = not watching.done()
        finally:
            # Its thread ends in order even where this is cancelled: no thread can be ended from outside.
            stopped.set()
            for end in ends:
                end.cancel()
            await asyncio.wait([watching])
        await watching
        return was_asked

    async def _await_resources(self, stop: asyncio.Event) -> bool:
        """Wait until the API server serves PPOJobs; return whether it serves RayClusters too."""
        namespace = self._settings.watch_namespace
        while not stop.is_set():
            try:
                if await self._cluster.serves_jobs(namespace):
                    return not namespace or await self._cluster.serves_clusters(namespace)
                logger.warning("the API server does not know PPOJobs: install the CustomResourceDefinition")
            except ApiError as error:
                logger.warning("the API server does not answer: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _RESOURCE_SECONDS)
        return True

    async def _await_kuberay(self) -> None:
        served = False
        while not served:
            await asyncio.sleep(_RESOURCE_SECONDS)
            with contextlib.suppress(ApiError):
                served = await self._cluster.serves_clusters(self._settings.watch_namespace)

    def _watch(self, stopped: threading.Event) -> None:
        namespace = self._settings.watch_namespace
        logger.info("watching PPOJobs, RayClusters, Jobs and pods in %s", namespace or "all namespaces")
        where: dict[str, Any] = {"namespaces": [namespace]} if namespace else {"clusterwide": True}
        operator = kopf.operator(
            registry=registry(self._note),
            settings=kopf_settings(self._settings),
            standalone=True,
            # Kopf's own would need a user's name; its type, a str, is not among its public names.
            identity=self._settings.pod_name,  # type: ignore[arg-type]
            stop_flag=stopped,
            ready_flag=self._ready,
            **where,
        )
        asyncio.run(operator)
