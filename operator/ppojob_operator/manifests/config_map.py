"""The ConfigMap with job.json and the certificate authority of the status endpoint."""

from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.resolve import JobFile, Reporting, job_root
from ppojob_api.v1alpha1.sources import localized
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Job, JobKey, Surroundings


def job_file(job: Job, spec: PPOJobSpec, surroundings: Surroundings) -> str:
    """Return the text of job.json. `spec` is resolved."""
    local, sources = localized(spec, spec.storage.mount_path)
    return JobFile(
        namespace=job.key.namespace,
        name=job.key.name,
        uid=job.uid,
        generation=job.generation,
        root=job_root(spec.storage.mount_path, job.key.namespace, job.key.name, job.uid, spec.checkpoint.resume),
        spec=local,
        sources=sources,
        adopted_uid=job.adopted_uid,
        reporting=Reporting(url=surroundings.report_url),
        version=None if job.status.operator is None else job.status.operator.version,
    ).encode()


def config_map(key: JobKey, uid: str, job_text: str, ca_bundle: str) -> dict[str, Any]:
    """Return the ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": naming.metadata(naming.config_map_name(key.name), key, uid),
        "data": {constants.JOB_FILE: job_text, constants.CA_FILE: ca_bundle},
    }
