"""A real S3 server on this machine: moto, in a separate environment. It keeps its buckets in memory.

It speaks S3's protocol, with conditional writes and multipart uploads, and checks no signatures.
"""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from tests.environments import OwnEnvironment, variables
from tests.ports import server_port

REQUIREMENTS = Path(__file__).with_name("s3-server-requirements.txt")
BUCKET = "bucket"
START_LIMIT_S = 120.0


@dataclass(frozen=True)
class S3Server:
    """A server that runs."""

    url: str
    store: S3Store

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables by which it is reached."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "known",
            "AWS_SECRET_ACCESS_KEY": "hidden-secret",
        }

    def keys(self, prefix: str) -> list[str]:
        """Return the keys below a prefix of the bucket, without it."""
        pages = obstore.list(self.store, prefix)
        return sorted(found["path"].removeprefix(f"{prefix}/") for page in pages for found in page)


@contextmanager
def serving(folder: Path) -> Iterator[S3Server]:
    """Start a server with an empty bucket; its log is in the folder."""
    python = OwnEnvironment("servers", "s3", REQUIREMENTS).python()
    port = server_port()
    log = folder / "s3.log"
    command: list[str | Path] = [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables(), cwd=folder)
    try:
        server = _server_at(f"http://127.0.0.1:{port}")
        _make_bucket(server, process, log)
        yield server
    finally:
        process.kill()
        process.wait(30)


def _server_at(url: str) -> S3Server:
    known: Any = {"access_key_id": "known", "secret_access_key": "hidden-secret", "region": "us-east-1"}
    return S3Server(url, S3Store(BUCKET, endpoint=url, client_options={"allow_http": True}, config=known))


def _make_bucket(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    request = urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT")
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_LIMIT_S):
                return
        except OSError:
            assert process.poll() is None, f"the S3 server has ended: {log.read_text()}"
            assert time.monotonic() < deadline, f"the S3 server does not answer: {log.read_text()}"
            time.sleep(0.1)
