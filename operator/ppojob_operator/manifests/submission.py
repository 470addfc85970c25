"""The submission of the trainer to Ray."""

import shlex

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Job, Submission


def submission(job: Job, *, attempt: int, cluster: str, job_text: str) -> Submission:
    """Return the submission of an attempt.

    The driver runs on the head: Ray puts it there as long as it asks for no resources. It carries the hash of
    job.json, because the kubelet may show an older file for a while: the trainer waits for the one that is meant.
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
        metadata={"ppojob": str(job.key), "uid": job.uid, "attempt": str(attempt)},
        cluster=cluster,
    )
