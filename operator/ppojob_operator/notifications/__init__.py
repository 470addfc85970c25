"""Notifies the administrator's receiver of what happens to jobs, by CloudEvents over HTTP.

    reconcile.outbox  which notifications a job has, and which wait in its status           (pure)
    notifier.py       the queue: one task for each job that has some, retries, a limit for each notification
    cloud_event.py    a notification as a CloudEvent                                        (pure)
    receiver.py       the only client of the receiver: one request

The loop calls `Notifier` before and after it writes a status. Nothing of this delays a reconcile or lets it fail. The
address comes from the operator's settings and never from a PPOJob: an author of jobs must not choose whom the operator
calls.
"""

from ppojob_operator.notifications.notifier import RESULTS, Backoff, Hooks, Notifier
from ppojob_operator.notifications.receiver import Receiver

__all__ = ["RESULTS", "Backoff", "Hooks", "Notifier", "Receiver"]
