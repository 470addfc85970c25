"""`kubectl ppo retry`: requests another run of a job that has ended, and waits until the operator has answered.

The request is an annotation with a unique value (`annotation_request.py`). `status.retry` has the value that was
answered last, and why a request was refused. Called by `app.py`. It refuses a job that has not ended.
"""

import time
from datetime import datetime

from ppojob_api.v1alpha1.constants import ANNOTATION_RETRY, Condition
from ppojob_trainer.kubectl.annotation_request import annotate
from ppojob_trainer.kubectl.client import Cluster, NotThereError, Raw, get_again
from ppojob_trainer.kubectl.status_table import is_finished

_POLL_SECONDS = 1.0


def run_again(cluster: Cluster, kind: str, job: Raw, now: datetime, seconds: float) -> str:
    """Request another run and return a sentence with the operator's answer.

    Raises:
        NotThereError: the job has not ended, the operator refuses, or it has not answered within `seconds`.
        KubectlError: with kubectl's words.
    """
    metadata = job["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    if not is_finished(job):
        phase = job.get("status", {}).get("phase", "Pending")
        raise NotThereError(
            f"{namespace}/{name} has not ended: its phase is {phase}. A suspended job continues with "
            f"kubectl ppo resume {name}"
        )
    value, limit = annotate(cluster, kind, job, ANNOTATION_RETRY, now), time.monotonic() + seconds
    while True:
        found = get_again(cluster, kind, namespace, name, metadata["uid"])
        answer = found.get("status", {}).get("retry", {})
        if answer.get("request") == value:
            if "refusal" in answer:
                raise NotThereError(f"{namespace}/{name} does not run again: {answer['refusal']}")
            return f"{namespace}/{name}: {_restart(found)}"
        if time.monotonic() >= limit:
            raise NotThereError(
                f"the operator has not answered within {seconds:g} s: the request to run {namespace}/{name} again "
                "stays active; check that the operator runs, and that it is not older than this plugin"
            )
        time.sleep(_POLL_SECONDS)


def _restart(job: Raw) -> str:
    """Return what the operator says of the next attempt."""
    status = job["status"]
    ended = (each for each in status.get("conditions", []) if each["type"] in (Condition.FAILED, Condition.COMPLETE))
    words = (each["message"] for each in ended if each["status"] == "False")
    return next(words, f"attempt {status.get('attempt', 0)} starts")
