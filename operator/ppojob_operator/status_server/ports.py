"""What the status server needs of the API server, as Protocols.

`cluster_progress.py` implements them; unit tests plug in their own. The server itself never speaks to the API server.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ppojob_operator.api_server import RawObject, StatusOf


class JobIdentity(NamedTuple):
    """One PPOJob object; the uid distinguishes it from a later one of the same name."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        """Return `namespace/name`, as kubectl users know it."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class TokenIdentity:
    """Whom a token stands for, as TokenReview has it."""

    username: str
    """`system:serviceaccount:<namespace>:<name>` for a pod."""
    audiences: tuple[str, ...]
    """Audiences of the review that the token is good for; empty where the API server does not know audiences."""
    pod_name: str | None = None
    """The pod that the token is bound to."""
    pod_uid: str | None = None
    """UID of that pod."""


class ProgressPort(Protocol):
    """The API server as the reports need it. Every method may raise ApiUnavailable or ApiRefused."""

    async def review_token(self, token: str, audience: str) -> TokenIdentity | None:
        """Return whom the token stands for, or None if it is not valid for the audience."""

    async def read_pod(self, namespace: str, name: str) -> RawObject | None:
        """Return the pod, or None if there is none; an index that lags by seconds will do."""

    async def read_job(self, namespace: str, name: str) -> RawObject | None:
        """Return the PPOJob, or None if there is none; an index that lags by seconds will do."""

    async def apply_progress(self, key: JobIdentity, status_of: StatusOf) -> bool:
        """Apply the part of the status that the reports own; False if that object is gone.

        `status_of` gets the current object and returns the status to write, or None if the object has a newer one.
        """


class SecretPort(Protocol):
    """The API server as the certificates need it. Every method may raise ApiUnavailable or ApiRefused."""

    async def read_secret(self, namespace: str, name: str) -> RawObject | None:
        """Return the Secret (`data` in base64), or None if there is none."""

    async def create_secret(self, secret: RawObject) -> bool:
        """Create it; False if there is one already."""

    async def replace_secret(self, secret: RawObject) -> bool:
        """Replace it; False if it changed since it was read (by its resourceVersion)."""
