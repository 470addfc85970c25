"""Which namespaces does this operator serve? All, those of a list, or those whose labels match a selector.

    PPOJOB_WATCH_NAMESPACES     the list; the watches see no other namespace
    PPOJOB_NAMESPACE_SELECTOR   the selector; the watches see all namespaces, and `adoption.py` asks `serves`
    neither                     all namespaces

The API server evaluates the selector. A watch reports changed labels by `changed`, a list then says what is selected,
and all jobs of a namespace that was added or removed are enqueued. `loop.py` runs it. It decides nothing about a job:
`ownership.py` says what happens to the jobs of a namespace that is not served.
"""

import asyncio
import logging
from collections.abc import Callable

from ppojob_operator.api_server import ApiError, ApiUnavailable
from ppojob_operator.cluster import Cluster
from ppojob_operator.plan import JobKey
from ppojob_operator.settings import Settings
from ppojob_operator.work_queue import wait

logger = logging.getLogger(__name__)

_ALL_NAMESPACES = ""
_TICK_SECONDS = 0.5
"""Between a changed label and the list, because several changes usually come together, as at the start of a watch."""
_RETRY_SECONDS = 5.0
"""Between two lists if the first one failed."""


class ServedNamespaces:
    """The namespaces whose jobs this operator runs."""

    def __init__(self, settings: Settings, cluster: Cluster, enqueue: Callable[[JobKey], object]) -> None:
        """`enqueue` is called with each job of a namespace that is served from now on, or not any more."""
        self._names = settings.watch_namespaces
        self._selector = settings.namespace_selector
        self._interval = settings.idle_interval
        self._cluster = cluster
        self._enqueue = enqueue
        self._selected: frozenset[str] | None = None
        """Namespaces that match the selector. None: they could not be listed yet."""
        self._to_enqueue: set[str] = set()
        self._is_changed = False

    @property
    def scopes(self) -> tuple[str, ...]:
        """The namespaces whose jobs a resync lists; an empty name stands for all."""
        return self._names or (_ALL_NAMESPACES,)

    @property
    def rule(self) -> str:
        """The setting that decides, in the words of the chart's values."""
        return f"namespaceSelector ({self._selector})" if self._selector else "watchNamespaces"

    def serves(self, namespace: str) -> bool:
        """Return whether the jobs of a namespace are this operator's to run.

        Raises:
            ApiUnavailable: the namespaces that the selector matches are not known yet.
        """
        if not self._selector:
            return not self._names or namespace in self._names
        if self._selected is None:
            raise ApiUnavailable("the namespaces that match namespaceSelector could not be listed yet")
        return namespace in self._selected

    def changed(self) -> None:
        """List the namespaces again soon: the labels of one have changed. The handlers of the watches call it."""
        self._is_changed = True

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the selected namespaces up to date until `stop` is set; a resync also finds what no watch reported."""
        if not self._selector:
            return
        clock = asyncio.get_running_loop().time
        due = clock()
        while not stop.is_set():
            if self._is_changed or clock() >= due:
                self._is_changed = False
                due = clock() + (self._interval if await self._refresh(str(self._selector)) else _RETRY_SECONDS)
            await wait(stop, _TICK_SECONDS)

    async def _refresh(self, selector: str) -> bool:
        """List the namespaces and enqueue the jobs of those that changed; return whether all of it was possible."""
        try:
            found = frozenset(await self._cluster.list_namespaces(selector))
            self._replace(found)
            for namespace in sorted(self._to_enqueue):
                for raw in await self._cluster.list_jobs(namespace):
                    self._enqueue(JobKey(namespace, raw["metadata"]["name"]))
                self._to_enqueue.discard(namespace)
        except ApiError as error:
            logger.warning("the namespaces that match namespaceSelector could not be brought up to date: %s", error)
            return False
        return True

    def _replace(self, found: frozenset[str]) -> None:
        before = self._selected
        self._selected = found
        if before is None:
            # The watches report the jobs of all namespaces at the start.
            logger.info("namespaceSelector (%s) matches %s", self._selector, ", ".join(sorted(found)) or "no namespace")
            return
        for namespace in sorted(before ^ found):
            words = "served from now on" if namespace in found else "not served any more"
            logger.info("namespace %s is %s: namespaceSelector is %s", namespace, words, self._selector)
            self._to_enqueue.add(namespace)
