"""The token of a RayCluster's dashboard, and the Secret from which Ray's pods read it.

The token is derived from a key of the operator, which therefore never reads a Secret in a user's namespace. It needs
permission to create Secrets there and, to delete those of replaced RayClusters, to delete what a PPOJob owns.
"""

import hashlib
import hmac
from typing import Any

from ppojob_operator.manifests import naming
from ppojob_operator.plan import JobKey

TOKEN_KEY = "auth_token"
"""Key in the Secret that KubeRay reads."""


def dashboard_token(key: bytes, uid: str, cluster: str) -> str:
    """Return the token of one RayCluster: HMAC-SHA256 over the job's UID and the cluster's name, 64 hex digits."""
    return hmac.new(key, f"{uid}/{cluster}".encode(), hashlib.sha256).hexdigest()


def dashboard_secret(key: JobKey, uid: str, cluster: str, token: str) -> dict[str, Any]:
    """Return the Secret with the token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": naming.metadata(naming.dashboard_secret_name(cluster), key, uid),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: token},
    }
