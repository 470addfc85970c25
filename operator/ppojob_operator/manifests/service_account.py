"""The ServiceAccount of a job's pods, without permissions and without a token of the API server.

Its only use is the projected token, by which the status server authenticates the trainer.
"""

from typing import Any

from ppojob_operator.manifests import naming
from ppojob_operator.plan import JobKey


def service_account(key: JobKey, uid: str) -> dict[str, Any]:
    """Return the ServiceAccount."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": naming.metadata(naming.service_account_name(key.name), key, uid),
        "automountServiceAccountToken": False,
    }
