"""A server on loopback that speaks the hub's HTTP API, as far as downloads need it.

Repositories with commits and branches, information with sizes, files with ETag, X-Repo-Commit and ranges, error codes
in X-Error-Code; repositories that ask for a token, and such whose licence was not accepted. A delay for each block
makes downloads slow enough to be killed.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_good-token"
BLOCK = 64 * 1024
_INFO = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/revision/(.+)")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """A repository with one commit."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    access: str = "public"
    """public; private: with the token only; gated: its licence was not accepted."""


@dataclass
class Hub:
    """What the server has, and what it was asked for."""

    url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    """By `models` or `datasets`, and by name."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path."""
    block_delay_s: float = 0.0
    failures: list[int] = field(default_factory=list)
    """Statuses of the next answers, before anything else."""

    def downloads(self, name: str) -> int:
        """Return how often a file was downloaded."""
        return sum(method == "GET" and path.endswith(f"/{name}") for method, path in self.requests)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if self.hub.failures:
            self._send(self.hub.failures.pop(0), b"busy")
        elif found := _INFO.fullmatch(path):
            self._info(found[1], found[2], found[3])
        elif found := _FILE.fullmatch(path):
            self._file("datasets" if found[1] else "models", found[2], found[3], found[4])
        else:
            self._send(404, b"{}")

    def _repository(self, kind: str, name: str, revision: str) -> Repository | None:
        found = self.hub.repositories.get((kind, name))
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if found is None or (found.access == "private" and not is_known):
            self._refuse(401, "RepoNotFound")
        elif found.access == "gated":
            self._refuse(403, "GatedRepo")
        elif revision not in ("main", found.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            return found
        return None

    def _info(self, kind: str, name: str, revision: str) -> None:
        found = self._repository(kind, name, revision)
        if found is None:
            return
        siblings = [{"rfilename": path, "size": len(content)} for path, content in found.files.items()]
        info: dict[str, Any] = {"id": name, "sha": found.commit, "siblings": siblings, "private": False}
        self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        found = self._repository(kind, name, revision)
        if found is None:
            return
        if path not in found.files:
            self._refuse(404, "EntryNotFound", {"X-Repo-Commit": found.commit})
            return
        content, start = found.files[path], 0
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": found.commit,
            "Accept-Ranges": "bytes",
        }
        if given := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(given[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if start else 200, content[start:], headers)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(body), BLOCK):
            time.sleep(self.hub.block_delay_s if len(body) > BLOCK else 0)
            self.wfile.write(body[start : start + BLOCK])

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing on stderr."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients of these tests are killed."""


@contextmanager
def serving(host: str = "127.0.0.1") -> Iterator[Hub]:
    """Start an empty hub on an address of this machine."""
    hub = Hub()
    server = _Server((host, 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://{host}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
