"""When the trainer's report in each job's status was seen to change last, by the clock of the leader alone.

The time that a report carries is of the clock of the replica that took it, and two nodes' clocks may be minutes apart:
compared with the leader's, a trainer that reports would look silent. `loop.py` asks at each look. What is seen for the
first time is as old as the look, so a new leader waits anew.
"""

from datetime import datetime

from ppojob_operator.plan import Job, JobKey

_Report = tuple[str, int | None, int | None, str | None]


class ReportTimes:
    """What was seen last of each job's reports."""

    def __init__(self) -> None:
        self._seen: dict[JobKey, tuple[_Report, datetime]] = {}

    def seen(self, job: Job, now: datetime) -> datetime | None:
        """Return when the report in the status was seen to change; None: there is none."""
        progress = job.status.progress
        if progress is None:
            return None
        report = (job.uid, progress.attempt, progress.report, progress.last_update_time)
        known = self._seen.get(job.key)
        if known is None or known[0] != report:
            known = self._seen[job.key] = (report, now)
        return known[1]

    def forget(self, key: JobKey) -> None:
        """Forget a job that is gone, or another operator's."""
        self._seen.pop(key, None)
