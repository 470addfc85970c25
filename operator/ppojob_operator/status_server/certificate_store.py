"""Where the certificates come from, and the TLS context that always has the newest ones.

Two sources of the same shape: a Secret that the operator fills itself and shares between its replicas (create or read,
replaced only if unchanged since it was read), or a folder that somebody else renews. `server.py` uses the store.
"""

import asyncio
import base64
import binascii
import logging
import ssl
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from ppojob_operator.api_server import ApiRefused, ApiUnavailable, RawObject
from ppojob_operator.status_server import certificates
from ppojob_operator.status_server.certificates import CertificateError, Certificates
from ppojob_operator.status_server.ports import SecretPort

_LOG = logging.getLogger(__name__)
_MAX_RACES = 5
_KEYS = {
    "ca.crt": "authorities", "tls.crt": "certificate", "tls.key": "key", "ca.key": "authority_key",
}  # fmt: skip
"""Keys of the Secret, and what they hold."""


class CertificateSource(Protocol):
    """Where certificates come from."""

    async def read(self) -> Certificates:
        """Return certificates that can be used now.

        Raises:
            CertificateError: there are none; with what to do.
            ApiUnavailable: the API server does not answer.
            ApiRefused: the operator lacks a right.
        """


class SecretSource:
    """Certificates that the operator makes itself, in a Secret."""

    def __init__(
        self, port: SecretPort, namespace: str, name: str, server_names: Sequence[str], clock: Callable[[], datetime]
    ) -> None:
        self._port = port
        self._namespace = namespace
        self._name = name
        self._server_names = server_names
        self._clock = clock

    async def read(self) -> Certificates:
        """Return the Secret's certificates; make or renew them first where that is due."""
        for _ in range(_MAX_RACES):
            secret = await self._port.read_secret(self._namespace, self._name)
            old = self._decode(secret)
            new = self._renew(old)
            if old and not new:
                return old
            new = new or certificates.make(self._server_names, self._clock())
            if await self._store(secret, new):
                _LOG.info("created certificates in Secret %s/%s: %r", self._namespace, self._name, new)
                return new
        raise CertificateError(
            f"Secret {self._namespace}/{self._name} changed {_MAX_RACES} times while it was being renewed: "
            "find the other client that writes it"
        )

    def _renew(self, old: Certificates | None) -> Certificates | None:
        """Return what takes the place of the old ones, or None where they are still good or there are none."""
        try:
            return certificates.renew(old, self._server_names, self._clock()) if old else None
        except CertificateError as error:
            raise self._unusable(str(error)) from error

    def _unusable(self, problem: str) -> CertificateError:
        return CertificateError(
            f"Secret {self._namespace}/{self._name} does not hold the operator's certificates ({problem}): "
            "delete its data, and the operator creates new certificates"
        )

    async def _store(self, secret: RawObject | None, new: Certificates) -> bool:
        """Write the Secret; False if another replica was quicker."""
        data = {key: base64.b64encode(getattr(new, field).encode()).decode() for key, field in _KEYS.items()}
        if secret is not None:
            return await self._port.replace_secret({**secret, "data": data})
        metadata = {"namespace": self._namespace, "name": self._name}
        return await self._port.create_secret(
            {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}
        )

    def _decode(self, secret: RawObject | None) -> Certificates | None:
        """Return what is in the Secret, or None if there is nothing (the chart makes it empty)."""
        data: Mapping[str, Any] = (secret or {}).get("data") or {}
        if not data:
            return None
        try:
            return Certificates(
                **{field: base64.b64decode(data[key], validate=True).decode() for key, field in _KEYS.items()}
            )
        except (KeyError, binascii.Error, UnicodeDecodeError) as error:
            raise self._unusable(f"{type(error).__name__} {error}") from error


class FolderSource:
    """Certificates in files that somebody else renews, such as cert-manager's Secret as a volume."""

    def __init__(self, folder: Path, clock: Callable[[], datetime]) -> None:
        self._folder = folder
        self._clock = clock

    async def read(self) -> Certificates:
        """Return the files' certificates."""
        found = await asyncio.to_thread(lambda: [self._text(name) for name in ("ca.crt", "tls.crt", "tls.key")])
        result = Certificates(*found)
        try:
            certificates.check(result, self._clock())
        except CertificateError as error:
            raise CertificateError(f"in {self._folder}: {error}") from error
        return result

    def _text(self, name: str) -> str:
        try:
            return (self._folder / name).read_text()
        except OSError as error:
            raise CertificateError(
                f"{self._folder / name} cannot be read ({error.strerror}): "
                "the Secret of `certificates.existingSecret` must have ca.crt, tls.crt and tls.key"
            ) from error


class CertificateStore:
    """The certificates in use."""

    def __init__(self, source: CertificateSource) -> None:
        self._source = source
        self._current: Certificates | None = None
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        """TLS context of the server; a renewed certificate serves the next connection."""
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    @property
    def ca_bundle(self) -> str:
        """The authorities that clients trust, in PEM.

        Raises:
            RuntimeError: `load` was not called.
        """
        if self._current is None:
            raise RuntimeError("the certificates are not loaded: await StatusServer.prepare() first")
        return self._current.authorities

    async def load(self) -> None:
        """Take the source's certificates into use if they changed. Raises what the source raises."""
        new = await self._source.read()
        if new == self._current:
            return
        _load_chain(self.context, new)
        self._current = new
        _LOG.info("using %r", new)

    async def keep_fresh(self, seconds: float) -> None:
        """Look for newer certificates until cancelled; the ones in use stay where there are no better ones."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.load()
            except (CertificateError, ApiRefused, ApiUnavailable) as error:
                _LOG.warning("the certificates could not be read; the old ones stay in use: %s", error)


def _load_chain(context: ssl.SSLContext, new: Certificates) -> None:
    """Load from memory: Python's TLS takes files only, so one lives for the moment, for the owner's eyes."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(new.certificate + new.key)
        file.flush()
        context.load_cert_chain(file.name)
