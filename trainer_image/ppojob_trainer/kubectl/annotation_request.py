"""Requests to a job by an annotation with a unique value, like kubectl's restartedAt.

The answer in the status has the value, so it belongs to this request, whatever the clocks of the machines say. Used by
`checkpoint_request.py` and `retry_request.py`.
"""

import json
import secrets
from datetime import datetime

from ppojob_trainer.kubectl.client import Cluster, Raw


def annotate(cluster: Cluster, kind: str, job: Raw, annotation: str, now: datetime) -> str:
    """Write the annotation and return its value.

    Raises:
        KubectlError: with kubectl's words.
    """
    metadata, value = job["metadata"], f"{now:%Y-%m-%dT%H:%M:%SZ}-{secrets.token_hex(4)}"
    patch = json.dumps({"metadata": {"annotations": {annotation: value}}})
    within = f"--namespace={metadata['namespace']}"
    cluster.output("patch", kind, metadata["name"], within, "--type=merge", f"--patch={patch}", "--output=json")
    return value
