"""What only the leader runs: the reconcile loop and its watches.

`main.py` passes `LeaderTasks.run` to the election. Each time that this replica becomes the leader, loop and watches are
created again and read everything from the API server, because another leader may have changed it. Every write calls
`guard` first, which fails if this replica no longer leads, so a replica that learns late of its loss changes nothing.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import aiohttp

from ppojob_operator.api_server import ApiServer
from ppojob_operator.cluster import Cluster
from ppojob_operator.dashboard import Dashboard
from ppojob_operator.handlers import Watches
from ppojob_operator.loop import Hooks, Loop
from ppojob_operator.notifications import RESULTS, Notifier, Receiver
from ppojob_operator.notifications import Hooks as NotifierHooks
from ppojob_operator.plan import JobKey, Surroundings
from ppojob_operator.reconcile import JobState
from ppojob_operator.settings import Settings
from ppojob_operator.status_server import Health, OperatorMetrics
from ppojob_operator.supervisor import supervise

_LOOP_HEARTBEAT_SECONDS = 300.0
_LOOP, _WATCH, _WATCHES, _NOTIFICATIONS = "loop", "watch", "watches", "notifications"


Part = Callable[[ApiServer, asyncio.Event], Coroutine[Any, Any, None]]
"""A further task of the leader. It runs until the event is set and may write to the API server."""


class LeaderTasks:
    """The tasks of the leader."""

    def __init__(
        self,
        settings: Settings,
        api: ApiServer,
        session: aiohttp.ClientSession,
        surroundings: Callable[[JobKey], Surroundings],
        health: Health,
        metrics: OperatorMetrics,
        parts: Mapping[str, Part],
    ) -> None:
        self._settings = settings
        self._api = api
        self._session = session
        self._surroundings = surroundings
        self._health = health
        self._metrics = metrics
        self._parts = parts
        self._loop: Loop | None = None

    @property
    def queue_depth(self) -> int:
        """Number of jobs that are due to be reconciled; 0 on a standby."""
        return 0 if self._loop is None else self._loop.queue_depth

    @property
    def num_left_alone(self) -> int:
        """Number of jobs that belong to another operator; 0 on a standby."""
        return 0 if self._loop is None else self._loop.num_left_alone

    def job_states(self) -> Mapping[JobKey, JobState] | None:
        """Return the jobs' states; None on a standby, so that a sum over replicas counts each job once."""
        return None if self._loop is None else self._loop.job_states()

    async def run(self, stop: asyncio.Event, guard: Callable[[], None]) -> None:
        """Reconcile jobs until `stop` is set or this is cancelled.

        Raises:
            RuntimeError: a task ended before `stop` was set.
        """
        api = self._api.guarded(guard)
        cluster = Cluster(api, reporter=self._settings.pod_name)
        metrics = self._metrics
        hooks = Hooks(
            beat=self._health.heartbeat(_LOOP, _LOOP_HEARTBEAT_SECONDS).beat,
            observe_reconcile=metrics.observe_reconcile,
            count_submission=metrics.count_submission,
            count_retries=metrics.count_retries,
        )
        dashboard = Dashboard(self._session, timeout=self._settings.request_timeout, guard=guard)
        notifier = self._notifier(guard)
        loop = Loop(self._settings, cluster, dashboard, self._surroundings, hooks, notifier)
        watches = Watches(
            self._settings, cluster, loop.enqueue, loop.namespaces.changed, count_failure=metrics.count_watch_failure
        )
        self._health.check(_WATCH, loop.watch_problem)
        self._health.ready_when(_WATCHES, lambda: None if watches.is_ready else "not connected yet")
        self._loop = loop
        try:
            parts = {name: part(api, stop) for name, part in self._parts.items()}
            own = {_LOOP: loop.run(stop), _WATCHES: watches.run(stop), _NOTIFICATIONS: notifier.run(stop)}
            await supervise(stop, {**own, **parts})
        finally:
            self._loop = None
            for name in (_LOOP, _WATCH, _WATCHES):
                self._health.forget(name)

    def _notifier(self, guard: Callable[[], None]) -> Notifier:
        def requeue(key: JobKey) -> None:
            if self._loop is not None:
                self._loop.requeue(key)

        hooks = NotifierHooks(guard, requeue, self._metrics.count_notification)
        if not self._settings.has_receiver:
            return Notifier(self._settings, hooks=hooks)
        self._metrics.expect_notifications(self._settings.types_to_notify, RESULTS)
        return Notifier(self._settings, Receiver(self._settings), hooks)
