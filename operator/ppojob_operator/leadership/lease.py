"""The Lease object, and the Protocol by which the election reads and writes it.

`election.py` uses it. The whole object is written with its resourceVersion, so if two replicas write at the same time,
the API server accepts one. Pure, except for the Protocol.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from ppojob_operator.api_server import RawObject

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


class LeasePort(Protocol):
    """The API server as the election needs it. Every method may raise ApiUnavailable or ApiRefused."""

    async def read(self, collection: str, namespace: str, name: str) -> RawObject | None:
        """Return the object, or None if there is none."""

    async def create(self, collection: str, manifest: RawObject) -> bool:
        """Create it; False if it exists."""

    async def replace(self, collection: str, manifest: RawObject) -> bool:
        """Replace it; False if it changed since it was read (by its resourceVersion) or was deleted."""


@dataclass(frozen=True)
class Lease:
    """The spec of a Lease. `renewed` and `acquired` are by the holder's clock and never compared with others."""

    holder: str = ""
    """Identity of the leader. Empty: the Lease was released."""
    duration: float = 0.0
    """Seconds after a renewal before a standby may take the Lease, by the standby's clock."""
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0
    """Number of changes of the holder."""

    @classmethod
    def read(cls, raw: RawObject) -> "Lease":
        """Return the Lease in an object of the API server; missing fields are empty."""
        spec: Mapping[str, Any] = raw.get("spec") or {}
        return cls(
            holder=spec.get("holderIdentity") or "",
            duration=float(spec.get("leaseDurationSeconds") or 0),
            acquired=spec.get("acquireTime") or "",
            renewed=spec.get("renewTime") or "",
            transitions=int(spec.get("leaseTransitions") or 0),
        )

    def taken_by(self, identity: str, duration: float, now: datetime) -> "Lease":
        """Return the Lease as `identity` writes it: renewed if it is the holder, else acquired."""
        moment = _micro_time(now)
        is_same = self.holder == identity
        return Lease(
            holder=identity,
            duration=duration,
            acquired=self.acquired if is_same else moment,
            renewed=moment,
            transitions=self.transitions if is_same else self.transitions + 1,
        )

    def released(self, now: datetime) -> "Lease":
        """Return the Lease without a holder, which a standby may take at once."""
        moment = _micro_time(now)
        return Lease("", 1.0, moment, moment, self.transitions)

    def to_spec(self) -> dict[str, Any]:
        """Return `spec` of the object."""
        return {
            "holderIdentity": self.holder,
            "leaseDurationSeconds": round(self.duration),
            "acquireTime": self.acquired,
            "renewTime": self.renewed,
            "leaseTransitions": self.transitions,
        }


def _micro_time(moment: datetime) -> str:
    """Return metav1.MicroTime."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
