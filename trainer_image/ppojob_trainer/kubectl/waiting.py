"""`kubectl ppo wait`: waits until a job has ended. Called by `app.py`.

`kubectl wait --for=condition=Complete` also waits for a job that has failed, until its timeout.
"""

import time

from ppojob_api.v1alpha1.constants import Condition
from ppojob_trainer.kubectl.client import Cluster, NotThereError, Raw, get_again
from ppojob_trainer.kubectl.status_table import is_finished, true_conditions

_POLL_SECONDS = 2.0


def wait_until_finished(cluster: Cluster, kind: str, job: Raw, seconds: float) -> Raw:
    """Return the job when it is complete or has failed.

    Raises:
        NotThereError: it was deleted, or has not ended within `seconds`; the message has its phase.
        KubectlError: with kubectl's words.
    """
    metadata, limit = job["metadata"], time.monotonic() + seconds
    namespace, name = metadata["namespace"], metadata["name"]
    while not is_finished(job):
        if time.monotonic() >= limit:
            phase = job.get("status", {}).get("phase", "Pending")
            raise NotThereError(f"{namespace}/{name} has not ended within {seconds:g} s: its phase is {phase}")
        time.sleep(_POLL_SECONDS)
        job = get_again(cluster, kind, namespace, name, metadata["uid"])
    return job


def verdict(job: Raw) -> tuple[str, bool]:
    """Return how a finished job has ended, as a sentence, and whether it is complete."""
    conditions = true_conditions(job)
    is_complete = Condition.COMPLETE in conditions
    final = conditions[Condition.COMPLETE if is_complete else Condition.FAILED]
    key = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
    return f"{key}: {final['type']}: {final['reason']}: {final['message']}", is_complete
