"""The submission of the trainer to Ray."""

import hashlib
import shlex
from collections.abc import Iterable, Mapping

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Job, Submission


def pods_key(pool: str) -> str:
    """Return under which name a submission remembers the pods of a pool."""
    return f"pods-{pool}"


def pods_digest(pods: Iterable[str]) -> str:
    """Return a text that is the same as long as the pods are the same: sixteen hex digits over their names."""
    return hashlib.sha256("\n".join(sorted(pods)).encode()).hexdigest()[:16]


def submission(job: Job, *, attempt: int, cluster: str, job_text: str, pods: Mapping[str, Iterable[str]]) -> Submission:
    """Return the submission of an attempt.

    The driver runs on the head: Ray puts it there as long as it asks for no resources. It carries the hash of
    job.json, because the kubelet may show an older file for a while: the trainer waits for the one that is meant.
    It remembers the pods (names by pool) that it begins with, so that a replaced pod is seen without comparing clocks.
    """
    arguments = [
        *("python", "-m", "ppojob_trainer.main"),
        *("--job", f"{constants.CONFIG_MOUNT_PATH}/{constants.JOB_FILE}"),
        *("--hash", JobFile.digest(job_text)),
        *("--generation", str(job.generation)),
        *("--attempt", str(attempt)),
    ]
    return Submission(
        submission_id=naming.submission_id(job.uid, attempt),
        entrypoint=shlex.join(arguments),
        environment={constants.EnvName.ATTEMPT: str(attempt)},
        metadata={
            "ppojob": str(job.key),
            "attempt": str(attempt),
            **{pods_key(pool): pods_digest(names) for pool, names in pods.items()},
        },
        cluster=cluster,
    )
