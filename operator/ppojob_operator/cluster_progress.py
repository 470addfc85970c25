"""The status server's view of the API server: token reviews, reads, the reports' part of the status, one Secret.

It implements `status_server.ports` with `api_server`; `main.py` connects them. Each report reads its pod and its job
from the API server's watch cache, because a thousand jobs read two hundred objects per second. It has no policy, no
cache and no log.
"""

from ppojob_api.v1alpha1 import constants
from ppojob_operator.api_server import JOBS, ApiServer, RawObject, StatusOf
from ppojob_operator.status_server.ports import JobIdentity, TokenIdentity

_PODS = "/api/v1/namespaces/{namespace}/pods"
_SECRETS = "/api/v1/namespaces/{namespace}/secrets"
_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"


class ProgressCluster:
    """ProgressPort and SecretPort on a real API server."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api

    async def review_token(self, token: str, audience: str) -> TokenIdentity | None:
        """Return the identity that the token proves, or None if it is not valid for the audience."""
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        answer = await self._api.call("POST", _REVIEWS, body=review)
        status = answer.expect(200, 201).get("status", {})
        # For a wrong audience, the API server omits `authenticated`.
        if not status.get("authenticated"):
            return None
        user = status.get("user", {})
        extra = user.get("extra") or {}
        return TokenIdentity(
            username=user.get("username", ""),
            audiences=tuple(status.get("audiences") or ()),
            pod_name=next(iter(extra.get(_POD_NAME) or ()), None),
            pod_uid=next(iter(extra.get(_POD_UID) or ()), None),
        )

    async def read_pod(self, namespace: str, name: str) -> RawObject | None:
        """Return the pod, or None if there is none."""
        return await self._api.read(_PODS, namespace, name, may_lag=True)

    async def read_job(self, namespace: str, name: str) -> RawObject | None:
        """Return the PPOJob, or None if there is none."""
        return await self._api.read(JOBS, namespace, name, may_lag=True)

    async def apply_progress(self, key: JobIdentity, status_of: StatusOf) -> bool:
        """Apply the reports' part of the status; False if the object was deleted or re-created."""
        return await self._api.apply_status(*key, status_of=status_of, manager=constants.FIELD_MANAGER_PROGRESS)

    async def read_secret(self, namespace: str, name: str) -> RawObject | None:
        """Return the Secret, or None if there is none."""
        return await self._api.read(_SECRETS, namespace, name)

    async def create_secret(self, secret: RawObject) -> bool:
        """Create the Secret; False if it exists."""
        return await self._api.create(_SECRETS, secret)

    async def replace_secret(self, secret: RawObject) -> bool:
        """Replace the Secret; False if it changed since it was read or was deleted."""
        return await self._api.replace(_SECRETS, secret)
