"""The Protocols by which admission uses the API server.

`cluster_admission.py` implements them; unit tests have their own implementation.
"""

from typing import Protocol

from ppojob_operator.api_server import RawObject
from ppojob_operator.reconcile.acceptance import Reference


class ReferencePort(Protocol):
    """Reads the objects that a spec names. Every method may raise ApiUnavailable or ApiRefused."""

    async def read_reference(self, reference: Reference, namespace: str) -> RawObject | None:
        """Return the object that a spec names, or None if there is none."""


class TrustPort(Protocol):
    """Reads and writes the CA bundle of webhooks. Every method may raise ApiUnavailable or ApiRefused."""

    async def read_webhooks(self, configuration: str) -> dict[str, str] | None:
        """Return the CA bundle (PEM, or empty) of each webhook in a ValidatingWebhookConfiguration, by name.

        None: the configuration does not exist.
        """

    async def trust(self, configuration: str, webhooks: list[str], ca_bundle: str) -> None:
        """Write the CA bundle (PEM) of these webhooks."""
