"""The leader's part of the operator: the loop and its watches, made anew for each term.

`main.py` gives `Term.run` to the election. Nothing of one term is used in the next: whatever another leader did in
between is read from the API server. Every write asks the election first (`guard`), so that a replica that leads no
longer changes nothing, however late it learns of it.
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
from ppojob_operator.plan import JobKey, Surroundings
from ppojob_operator.reconcile import JobState
from ppojob_operator.settings import Settings
from ppojob_operator.status_server import Health, OperatorMetrics
from ppojob_operator.together import run_together

_LOOP_PULSE_SECONDS = 300.0
_LOOP, _WATCH, _WATCHES = "loop", "watch", "watches"


Part = Callable[[ApiServer, asyncio.Event], Coroutine[Any, Any, None]]
"""What else runs while the leader leads: until the event is set, with an API server that it may write to."""


class Term:
    """What only the leader runs."""

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
        """How many jobs wait for a look; none on a replica that stands by."""
        return 0 if self._loop is None else self._loop.queue_depth

    @property
    def num_left_alone(self) -> int:
        """How many jobs another operator runs; none on a replica that stands by."""
        return 0 if self._loop is None else self._loop.num_left_alone

    def job_states(self) -> Mapping[JobKey, JobState] | None:
        """Return the jobs; None on a replica that does not lead, so that a sum over replicas counts once."""
        return None if self._loop is None else self._loop.job_states()

    async def run(self, stop: asyncio.Event, guard: Callable[[], None]) -> None:
        """Look after the jobs until `stop` is set, or this is cancelled.

        Raises:
            RuntimeError: one of its parts ended by itself.
        """
        api = self._api.guarded(guard)
        cluster = Cluster(api, reporter=self._settings.pod_name)
        metrics = self._metrics
        hooks = Hooks(
            beat=self._health.pulse(_LOOP, _LOOP_PULSE_SECONDS).beat,
            observe_look=metrics.observe_reconcile,
            count_submission=metrics.count_submission,
            count_retries=metrics.count_retries,
        )
        dashboard = Dashboard(self._session, timeout=self._settings.request_timeout, guard=guard)
        loop = Loop(self._settings, cluster, dashboard, self._surroundings, hooks)
        watches = Watches(self._settings, cluster, loop.note, metrics.count_watch_failure)
        self._health.check(_WATCH, loop.watch_problem)
        self._health.ready_when(_WATCHES, lambda: None if watches.is_ready else "not connected yet")
        self._loop = loop
        try:
            parts = {name: part(api, stop) for name, part in self._parts.items()}
            await run_together(stop, {_LOOP: loop.run(stop), _WATCHES: watches.run(stop), **parts})
        finally:
            self._loop = None
            for name in (_LOOP, _WATCH, _WATCHES):
                self._health.forget(name)
