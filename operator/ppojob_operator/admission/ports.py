"""What admission needs of the API server, as Protocols.

`cluster_admission.py` implements them; unit tests plug in their own.
"""

from typing import Protocol

from ppojob_operator.api_server import RawObject
from ppojob_operator.reconcile.references import Reference


class ReferencePort(Protocol):
    """The API server as the verdict needs it. Every method may raise ApiUnavailable or ApiRefused."""

    async def read_reference(self, reference: Reference, namespace: str) -> RawObject | None:
        """Return the object that a spec names, or None if there is none."""


class TrustPort(Protocol):
    """The API server as the certificates need it. Every method may raise ApiUnavailable or ApiRefused."""

    async def read_webhooks(self, configuration: str) -> dict[str, str] | None:
        """Return the names of the webhooks of a ValidatingWebhookConfiguration, and whom each trusts (PEM, or nothing).

        None: there is no such configuration.
        """

    async def trust(self, configuration: str, webhooks: list[str], ca_bundle: str) -> None:
        """Let these webhooks trust the authorities, in PEM."""
