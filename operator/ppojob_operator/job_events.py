"""Writes the Events of jobs. One that cannot be written now is kept, and written at the job's next reconcile.

`loop.py` calls it after a status write: the next reconcile sees that status and would not decide on the Event again.
Events are kept in memory only. A change of the leader may lose them; the status has the same words.
"""

import logging
from collections.abc import Iterable

from ppojob_operator.api_server import ApiRefused
from ppojob_operator.cluster import Cluster
from ppojob_operator.plan import EventRecord, Job, JobKey

logger = logging.getLogger(__name__)


class JobEvents:
    """The Events of all jobs; a job is reconciled by one worker at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._unsent: dict[JobKey, list[tuple[Job, EventRecord]]] = {}

    async def write(self, job: Job, events: Iterable[EventRecord]) -> None:
        """Write what was kept of the job, and these.

        Raises:
            ApiUnavailable: the API server does not answer; all that is not written is kept.
        """
        unsent = self._unsent.setdefault(job.key, [])
        unsent.extend((job, event) for event in events)
        while unsent:
            try:
                await self._cluster.emit(*unsent[0])
            except ApiRefused as error:
                logger.warning("%s: the Event %s could not be written: %s", job.key, unsent[0][1].reason, error)
            del unsent[0]
        del self._unsent[job.key]

    def forget(self, key: JobKey) -> None:
        """Drop what is kept of a job that is deleted."""
        self._unsent.pop(key, None)
