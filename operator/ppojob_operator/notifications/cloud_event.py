"""A notification as a CloudEvent 1.0 in the structured mode of its HTTP binding. `notifier.py` calls it. Pure.

Structured, because the whole event is then one JSON document: a relay can store, sign or forward the body alone, and
texts need no encoding for headers. docs/notifications.md describes each member.
"""

import json
import math

from ppojob_api.v1alpha1.notification import PendingNotification
from ppojob_operator.plan import JobKey

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
TYPE_PREFIX = "dev.ppojob.job."
"""Before the notification's type."""


def event_id(uid: str, notification: PendingNotification) -> str:
    """Return the id of the event: the same at each try, and after a restart of the operator."""
    return f"{uid}-{notification.number}"


def cloud_event(cluster: str, key: JobKey, uid: str, notification: PendingNotification) -> bytes:
    """Return the body of the request.

    Args:
        cluster: the cluster's name in the operator's settings.
        key: namespace and name of the PPOJob.
        uid: of the PPOJob.
        notification: what has happened.
    """
    event = {
        "specversion": "1.0",
        "id": event_id(uid, notification),
        "source": f"/clusters/{cluster}/namespaces/{key.namespace}/ppojobs/{uid}",
        "type": f"{TYPE_PREFIX}{notification.type}",
        "subject": str(key),
        "time": notification.time,
        "datacontenttype": "application/json",
        "data": {
            "cluster": cluster,
            "namespace": key.namespace,
            "name": key.name,
            "uid": uid,
            "number": notification.number,
            "phase": notification.phase,
            "reason": notification.reason,
            "message": notification.message,
            "attempt": notification.attempt,
            "step": notification.step,
            "totalSteps": notification.total_steps,
            "reward": _number(notification.reward),
            "checkpoint": notification.checkpoint,
        },
    }
    return json.dumps(event, ensure_ascii=False, allow_nan=False).encode()


def _number(text: str | None) -> float | None:
    """Return a number of the status; None if there is none, or one that JSON does not have."""
    try:
        value = math.nan if text is None else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
