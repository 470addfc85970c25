"""The submission of an attempt's trainer to Ray. Pure; `reconcile.submission` calls it."""

import hashlib
import shlex
from collections.abc import Iterable, Mapping

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Job, Submission


def pods_key(pool: str) -> str:
    """Return the metadata key for the pods of a pool."""
    return f"pods-{pool}"


def pods_digest(pods: Iterable[str]) -> str:
    """Return a digest of the pods' names: sixteen hex digits."""
    return hashlib.sha256("\n".join(sorted(pods)).encode()).hexdigest()[:16]


def submission(job: Job, *, attempt: int, cluster: str, job_text: str, pods: Mapping[str, Iterable[str]]) -> Submission:
    """Return the submission of an attempt.

    Ray runs a driver without resource requests on the head. The command has the hash of job.json, because the kubelet
    may serve an older file for a while; the trainer waits for the right one. The metadata has a digest of each pool's
    pods, so that a replaced pod is detected without comparing clocks.
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
