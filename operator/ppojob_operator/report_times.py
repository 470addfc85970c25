"""When the trainer's report in each job's status last changed, by the leader's clock.

A report has the time of the replica that received it. Clocks of two nodes may differ by minutes, so a comparison with
the leader's clock could make a reporting trainer look silent. `loop.py` calls it at each reconcile. A report that is
seen for the first time counts as new, so a new leader waits for the whole timeout.
"""

from datetime import datetime

from ppojob_operator.plan import Job, JobKey

_Report = tuple[str, int | None, int | None, str | None]


class ReportTimes:
    """The last observed report of each job."""

    def __init__(self) -> None:
        self._seen: dict[JobKey, tuple[_Report, datetime]] = {}

    def seen(self, job: Job, now: datetime) -> datetime | None:
        """Return when the report in the status last changed; None if there is no report."""
        progress = job.status.progress
        if progress is None:
            return None
        report = (job.uid, progress.attempt, progress.report, progress.last_update_time)
        known = self._seen.get(job.key)
        if known is None or known[0] != report:
            known = self._seen[job.key] = (report, now)
        return known[1]

    def forget(self, key: JobKey) -> None:
        """Forget a job that was deleted or belongs to another operator."""
        self._seen.pop(key, None)
