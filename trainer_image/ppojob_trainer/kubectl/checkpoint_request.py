"""`kubectl ppo checkpoint`: requests a checkpoint of a running job, and waits until the status shows the answer.

The request is an annotation with a unique value (`annotation_request.py`). The trainer receives it in the reply to
its next report and answers it once, after its current step. Called by `app.py`. It refuses a job that has no trainer,
because nothing could be saved. It compares no clocks, because this machine's may be wrong.
"""

import time
from dataclasses import dataclass
from datetime import datetime

from ppojob_api.v1alpha1.constants import ANNOTATION_CHECKPOINT, Condition
from ppojob_trainer.kubectl.annotation_request import annotate
from ppojob_trainer.kubectl.client import Cluster, NotThereError, Raw, get_again
from ppojob_trainer.kubectl.status_table import true_conditions

_POLL_SECONDS = 1.0
_ENDED = (Condition.COMPLETE, Condition.FAILED)


@dataclass(frozen=True)
class Request:
    """What a job was asked for."""

    namespace: str
    name: str
    uid: str
    value: str
    """Of the annotation."""
    step: int
    """Steps that were done, as the status had it: a checkpoint of an earlier one is no answer."""

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


def ask(cluster: Cluster, kind: str, job: Raw, now: datetime) -> Request:
    """Ask the job's trainer for a checkpoint.

    Raises:
        NotThereError: the job has no trainer; the message says why, and what there is instead.
        KubectlError: with kubectl's words.
    """
    metadata, status = job["metadata"], job.get("status", {})
    key = f"{metadata['namespace']}/{metadata['name']}"
    if reason := _over(job) or _not_begun(job):
        raise NotThereError(f"{key} {reason}, so there is nothing to save; {_newest(status)}")
    return Request(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        value=annotate(cluster, kind, job, ANNOTATION_CHECKPOINT, now),
        step=status.get("progress", {}).get("step", 0),
    )


def await_answer(cluster: Cluster, kind: str, request: Request, seconds: float) -> str:
    """Wait for the checkpoint and return a sentence with its step.

    Raises:
        NotThereError: it did not come within `seconds`, or the job has ended without it.
        KubectlError: with kubectl's words.
    """
    limit = time.monotonic() + seconds
    while True:
        job = get_again(cluster, kind, request.namespace, request.name, request.uid)
        found, reason = job.get("status", {}).get("checkpoint"), _over(job)
        if found and (_is_answer(job, request) or (reason and found["step"] >= request.step)):
            return f"{request.key}: checkpoint of step {found['step']}: {found['path']}"
        if reason:
            raise NotThereError(f"{request.key} {reason} and saved none; {_newest(job.get('status', {}))}")
        if time.monotonic() >= limit:
            raise NotThereError(
                f"{request.key} has saved no checkpoint within {seconds:g} s: the request stays active, and the "
                f"trainer saves one after the current step; see kubectl ppo status {request.name}"
            )
        time.sleep(_POLL_SECONDS)


def _is_answer(job: Raw, request: Request) -> bool:
    """Return whether the newest checkpoint answers the request, or a later one that has taken its place."""
    answered = job["status"]["checkpoint"].get("request")
    return answered in (request.value, job["metadata"].get("annotations", {}).get(ANNOTATION_CHECKPOINT, request.value))


def _over(job: Raw) -> str:
    """Return why nothing more is to come from the job as it is; empty: it goes on."""
    true = true_conditions(job)
    for kind in _ENDED:
        if kind in true:
            return f"has ended ({kind}: {true[kind]['reason']})"
    if job["metadata"].get("deletionTimestamp"):
        return "is being deleted"
    return "is suspended" if Condition.SUSPENDED in true else ""


def _not_begun(job: Raw) -> str:
    """Return that a job has no trainer at the moment; empty: it has one."""
    return "" if Condition.SUBMITTED in true_conditions(job) else "has no trainer (see kubectl ppo explain-pending)"


def _newest(status: Raw) -> str:
    found = status.get("checkpoint")
    return f"its newest checkpoint is of step {found['step']}: {found['path']}" if found else "it has no checkpoint"
