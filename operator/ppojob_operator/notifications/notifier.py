"""The notifications on their way: what the loop puts into statuses and what the receiver gets.

    loop ── add ──▶ status with `pending` ── write ──▶ API server
      └─── send ──▶ one task per job, in the order of its notifications ── Receiver.post ──▶ receiver
                          └─ accepted, refused or too old: `settled`, and the job is reconciled again, which removes it

The status has each notification before the first try and until it is settled, so a restart or another leader loses
none: it sends what is pending. A receiver may get one twice, with the same id. The queue is bounded; what does not fit
stays in the status and is offered again at the job's next reconcile, at the latest after a resync.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ppojob_api.v1alpha1.notification import NotificationsStatus, PendingNotification
from ppojob_operator import logs
from ppojob_operator.api_server import ApiUnavailable
from ppojob_operator.notifications.cloud_event import cloud_event, event_id
from ppojob_operator.notifications.receiver import Outcome, Receiver
from ppojob_operator.plan import Job, JobKey, Plan
from ppojob_operator.reconcile.outbox import with_notifications
from ppojob_operator.settings import Settings
from ppojob_operator.times import parse_time
from ppojob_operator.work_queue import wait

logger = logging.getLogger(__name__)

MAX_QUEUED = 1000
_MAX_REQUESTS = 8
"""Requests at the same time."""
_FLUSH_SECONDS = 5.0
"""Time at the stop for requests in progress and for notifications that were not tried yet."""
SENT, RETRIED, REFUSED, EXPIRED, DISPLACED = RESULTS = ("sent", "retried", "refused", "expired", "displaced")
"""Results that are counted. Retried: a failed try that is repeated. Displaced: too many waited in the job's status."""


@dataclass(frozen=True)
class Backoff:
    """The pauses between two tries, in seconds: from `first`, doubled up to `longest`, half of each at random."""

    first: float = 1.0
    longest: float = 300.0
    longest_asked: float = 3600.0
    """Longest pause that the receiver may ask for."""

    def pause(self, tries: int, retry_after: float | None) -> float:
        """Return the pause after this number of tries."""
        usual = min(self.longest, self.first * 2.0 ** min(tries - 1, 20)) * random.uniform(0.5, 1.0)
        return usual if retry_after is None else max(usual, min(retry_after, self.longest_asked))


@dataclass(frozen=True)
class Hooks:
    """What the notifier calls."""

    guard: Callable[[], None] = lambda: None
    """Called before each try. ApiUnavailable: this replica does not lead, and must not send."""
    requeue: Callable[[JobKey], None] = lambda key: None
    """Called when the status of a job has a notification that is settled."""
    count: Callable[[str, str], None] = lambda kind, result: None
    """Called with a notification's type and one of RESULTS."""


@dataclass(frozen=True)
class _Message:
    """A notification in the queue."""

    key: JobKey
    uid: str
    notification: PendingNotification
    body: bytes

    @property
    def id(self) -> str:
        """The id of the event."""
        return event_id(self.uid, self.notification)


class Notifier:
    """The notifications of all jobs; the leader has one."""

    def __init__(
        self, settings: Settings, receiver: Receiver | None = None, hooks: Hooks = Hooks(), backoff: Backoff = Backoff()
    ) -> None:
        """Create the queue. Without a receiver, nothing is notified, and what is pending in statuses is removed."""
        self._cluster = settings.notification_cluster
        self._types = settings.types_to_notify if receiver is not None else frozenset[str]()
        self._give_up_after = timedelta(seconds=settings.notification_give_up_after)
        self._receiver = receiver
        self._hooks = hooks
        self._backoff = backoff
        self._queues: dict[str, deque[_Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued: set[str] = set()
        self._settled: dict[JobKey, set[str]] = {}
        self._requests = asyncio.Semaphore(_MAX_REQUESTS)
        self._stopping = asyncio.Event()

    # What the loop calls.

    def add(self, job: Job, plan: Plan, now: datetime) -> Plan:
        """Return the plan with its notifications in the status, without those that are settled."""
        pending, settled = _pending(job.status.notifications), self._settled.get(job.key, set())
        numbers = {each.number for each in pending if event_id(job.uid, each) in settled}
        return with_notifications(plan, job, self._types, numbers, now)

    def send(self, job: Job, plan: Plan) -> None:
        """Queue what is pending in the status that was written, or that the job has if none was."""
        before = after = _pending(job.status.notifications)
        if plan.status is not None:
            after = _pending(NotificationsStatus.model_validate(plan.status.get("notifications", {}), extra="ignore"))
        ids = {event_id(job.uid, each) for each in after}
        for old in before:
            if event_id(job.uid, old) not in ids | self._queued | self._settled.get(job.key, set()):
                self._log_drop(job.key, event_id(job.uid, old), old, "too many notifications of the job are pending")
                self._hooks.count(old.type, DISPLACED)
        if settled := self._settled.pop(job.key, set()) & ids:
            self._settled[job.key] = settled
        self._offer(job, (each for each in after if event_id(job.uid, each) not in settled))

    def forget(self, key: JobKey) -> None:
        """Forget which notifications of a deleted job are settled. Those in the queue are still sent."""
        self._settled.pop(key, None)

    # What the leader runs.

    async def run(self, stop: asyncio.Event) -> None:
        """Send until `stop` is set, and end within some seconds. What is not accepted then stays in the statuses."""
        try:
            await stop.wait()
            self._stopping.set()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_FLUSH_SECONDS)
        finally:
            self._stopping.set()
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _offer(self, job: Job, pending: Iterable[PendingNotification]) -> None:
        for notification in pending:
            if event_id(job.uid, notification) in self._queued:
                continue
            if self._stopping.is_set() or len(self._queued) >= MAX_QUEUED:
                return
            body = cloud_event(self._cluster, job.key, job.uid, notification)
            self._put(_Message(job.key, job.uid, notification, body))

    def _put(self, message: _Message) -> None:
        self._queued.add(message.id)
        queue = self._queues.get(message.uid)
        if queue is not None:
            queue.append(message)
            return
        self._queues[message.uid] = deque([message])
        task = asyncio.create_task(self._drain(message.uid), name=f"notifications of {message.key}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Without its message, which may have the address. The notification stays in the status.
            logger.error("%s: bug in the operator: %s", task.get_name(), type(error).__name__)

    async def _drain(self, uid: str) -> None:
        """Send the notifications of a job, one after the other, until none is left or the operator stops."""
        queue = self._queues[uid]
        try:
            while queue:
                message = queue[0]
                with logs.about(message.key):
                    result = await self._deliver(message)
                if not result:
                    return
                queue.popleft()
                self._settle(message, result)
        finally:
            # Those that are not settled are in the status, and are offered again.
            self._queued.difference_update(message.id for message in queue)
            del self._queues[uid]

    async def _deliver(self, message: _Message) -> str:
        """Return the result of a notification; "" if it is not settled, because this replica stops."""
        tries = 0
        while True:
            tries += 1
            try:
                outcome = await self._try(message)
            except ApiUnavailable:
                return ""
            if not outcome.problem:
                return SENT
            if outcome.is_final:
                self._log_drop(message.key, message.id, message.notification, outcome.problem)
                return REFUSED
            pause = self._backoff.pause(tries, outcome.retry_after)
            if self._age(message) + timedelta(seconds=pause) > self._give_up_after:
                self._log_drop(message.key, message.id, message.notification, outcome.problem)
                return EXPIRED
            self._hooks.count(message.notification.type, RETRIED)
            level = logging.WARNING if tries == 1 else logging.DEBUG
            words = "%s: notification %s (%s) was not accepted: %s; next try in %.1f s"
            logger.log(level, words, message.key, message.id, message.notification.type, outcome.problem, pause)
            if await wait(self._stopping, pause):
                return ""

    async def _try(self, message: _Message) -> Outcome:
        assert self._receiver is not None
        async with self._requests:
            self._hooks.guard()
            return await self._receiver.post(message.body)

    def _age(self, message: _Message) -> timedelta:
        return datetime.now(UTC) - parse_time(message.notification.time)

    def _log_drop(self, key: JobKey, identity: str, notification: PendingNotification, problem: str) -> None:
        logger.error("%s: notification %s (%s) is dropped: %s", key, identity, notification.type, problem)

    def _settle(self, message: _Message, result: str) -> None:
        self._queued.discard(message.id)
        self._settled.setdefault(message.key, set()).add(message.id)
        self._hooks.count(message.notification.type, result)
        self._hooks.requeue(message.key)


def _pending(notifications: NotificationsStatus | None) -> list[PendingNotification]:
    return [] if notifications is None else notifications.pending
