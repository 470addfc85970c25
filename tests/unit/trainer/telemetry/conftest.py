"""A real HTTPS endpoint that takes reports, with its own certificate authority."""

import datetime
import http.server
import ipaddress
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ppojob_api.v1alpha1.resolve import Reporting


def _wait_until(is_true: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Wait for something that another thread does; fail with its name."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.01)


def _write_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return paths


@pytest.fixture
def wait_until() -> Callable[..., None]:
    return _wait_until


@pytest.fixture
def make_certificate() -> Callable[[Path, str], tuple[Path, Path]]:
    return _write_certificate


@dataclass
class Endpoint:
    """What arrived, and what is answered."""

    reporting: Reporting
    token: Path
    reports: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    status: int = 200
    answer: str = "{}"
    may_answer: threading.Event = field(default_factory=threading.Event)

    @property
    def last_step(self) -> int:
        """Step of the last report that arrived; -1 before the first."""
        return self.reports[-1]["step"] if self.reports else -1


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    certificate, key = _write_certificate(tmp_path, "endpoint")
    token = tmp_path / "token"
    token.write_text("first-token\n")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert found.may_answer.wait(600)
            # A test waits for the report.
            found.tokens.append(self.headers["Authorization"])
            found.reports.append(json.loads(body))
            self.send_response(found.status)
            self.end_headers()
            self.wfile.write(found.answer.encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing on stderr."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://127.0.0.1:{server.server_port}/v1alpha1/namespaces/a/ppojobs/b/progress"
    reporting = Reporting(url=url, token_path=str(token), ca_path=str(certificate), interval_seconds=1)
    found = Endpoint(reporting, token)
    found.may_answer.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    found.may_answer.set()
    server.shutdown()
    server.server_close()
    thread.join()
