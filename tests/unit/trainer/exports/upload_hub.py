"""A small HuggingFace hub on loopback that takes uploads, for the real client: huggingface_hub with git-LFS.

It knows accounts, creation of repositories, preupload, LFS batches, commits, trees and tags; it serves no downloads.
Contents are in memory. `fail` makes the next requests to a path fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_a-token-of-the-tests"
LARGE = ".safetensors"
"""Files with this ending go through LFS."""


@dataclass
class Repository:
    """A model repository: its commits, oldest first, and its tags."""

    is_private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=lambda: [("", {".gitattributes": b"lfs"})])
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        """The files of `main`."""
        return self.commits[-1][1]

    @property
    def messages(self) -> list[str]:
        return [message for message, _ in self.commits[1:]]

    def at(self, tag: str) -> dict[str, bytes]:
        """Return the files of a tag."""
        return self.commits[int(self.tags[tag], 16)][1]


@dataclass
class UploadHub:
    """The state of the hub."""

    url: str = ""
    role: str = "write"
    """What the token may do; `read` or `write`."""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    failures: list[tuple[str, int]] = field(default_factory=list)

    def fail(self, path: str, status: int, times: int = 1) -> None:
        """Answer the next requests whose method and path match a pattern with a status."""
        self.failures += [(path, status)] * times

    def failure(self, request: str) -> int | None:
        for index, (pattern, status) in enumerate(self.failures):
            if re.search(pattern, request):
                del self.failures[index]
                return status
        return None


@contextmanager
def serving() -> Iterator[UploadHub]:
    """Serve a hub without repositories, with the account `somebody` in the organisation `team`."""
    hub = UploadHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: UploadHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        request = f"{method} {path}"
        self.state.requests.append(request)
        if status := self.state.failure(request):
            self._send(status, {"error": f"failed on request: {status}"})
            return
        is_signed = path.startswith("/objects/")
        if not is_signed and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid username or password."})
            return
        for pattern, handle in _ROUTES.items():
            if found := re.fullmatch(pattern, request):
                handle(self, body, *found.groups())
                return
        self._send(404, {"error": f"the tests' hub has no {request}"})

    def _send(self, status: int, content: Any, code: str = "") -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(data)

    def _repository(self, name: str) -> Repository | None:
        found = self.state.repositories.get(name)
        if found is None:
            self._send(404, {"error": "Repository not found"}, "RepoNotFound")
        return found

    def whoami(self, body: bytes) -> None:
        account = {"name": "somebody", "orgs": [{"name": "team"}], "auth": {"accessToken": {"role": self.state.role}}}
        self._send(200, account)

    def auth_check(self, body: bytes, name: str) -> None:
        if self._repository(name) is not None:
            self._send(200 if self.state.role == "write" else 403, {})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization'] or 'somebody'}/{asked['name']}"
        if name in self.state.repositories:
            self._send(409, {"error": "You already created this model repo", "url": f"{self.state.url}/{name}"})
            return
        self.state.repositories[name] = Repository(is_private=asked.get("visibility") == "private")
        self._send(200, {"url": f"{self.state.url}/{name}"})

    def validate(self, body: bytes) -> None:
        is_card = json.loads(body)["content"].startswith("---\n")
        warnings = [] if is_card else [{"message": "empty or missing yaml metadata in repo card"}]
        self._send(200, {"errors": [], "warnings": warnings})

    def preupload(self, body: bytes, name: str) -> None:
        if (repository := self._repository(name)) is None:
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": _oid(file["path"], repository.files.get(file["path"])),
            }
            for file in json.loads(body)["files"]
        ]
        self._send(200, {"files": files})

    def batch(self, body: bytes, name: str) -> None:
        answers = []
        for wanted in json.loads(body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.state.objects:
                href = f"{self.state.url}/objects/{wanted['oid']}?signature=signed-secret"
                answer["actions"] = {"upload": {"href": href, "header": {}}}
            answers.append(answer)
        self._send(200, {"transfer": "basic", "objects": answers})

    def put(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.state.objects[oid] = body
        self._send(200, {})

    def commit(self, body: bytes, name: str) -> None:
        if (repository := self._repository(name)) is None:
            return
        header, *operations = map(json.loads, body.splitlines())
        files = dict(repository.files)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.state.objects[value["oid"]]
            else:
                del files[value["path"]]
        repository.commits.append((header["value"]["summary"], files))
        self._send(200, {"commitUrl": f"{self.state.url}/{name}/commit/1", "commitOid": _sha(repository)})

    def info(self, body: bytes, name: str) -> None:
        if (repository := self._repository(name)) is not None:
            self._send(200, {"id": name, "sha": _sha(repository), "private": repository.is_private})

    def tree(self, body: bytes, name: str) -> None:
        if (repository := self._repository(name)) is not None:
            files = repository.files.items()
            entries = [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in files]
            self._send(200, entries)

    def tag(self, body: bytes, name: str, revision: str) -> None:
        tag = json.loads(body)["tag"]
        if (repository := self._repository(name)) is None:
            return
        if tag in repository.tags:
            self._send(409, {"error": "Tag already exists"})
            return
        repository.tags[tag] = revision
        self._send(200, {})

    def untag(self, body: bytes, name: str, tag: str) -> None:
        if (repository := self._repository(name)) is None:
            return
        if repository.tags.pop(tag, None) is None:
            self._send(404, {"error": "Tag not found"}, "RevisionNotFound")
        else:
            self._send(200, {})


def _sha(repository: Repository) -> str:
    return f"{len(repository.commits) - 1:040x}"


def _oid(path: str, content: bytes | None) -> str | None:
    """Return git's name of a file's content, or the one of LFS; None for a file that is not there."""
    if content is None:
        return None
    if path.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


_NAME = "([^/]+/[^/]+)"
_ROUTES = {
    "GET /api/whoami-v2": _Handler.whoami,
    f"GET /api/models/{_NAME}/auth-check/write": _Handler.auth_check,
    "POST /api/repos/create": _Handler.create,
    "POST /api/validate-yaml": _Handler.validate,
    f"POST /api/models/{_NAME}/preupload/main": _Handler.preupload,
    rf"POST /{_NAME}\.git/info/lfs/objects/batch": _Handler.batch,
    "PUT /objects/([0-9a-f]+)": _Handler.put,
    f"POST /api/models/{_NAME}/commit/main": _Handler.commit,
    f"GET /api/models/{_NAME}(?:/revision/main)?": _Handler.info,
    f"GET /api/models/{_NAME}/tree/main": _Handler.tree,
    f"POST /api/models/{_NAME}/tag/([^/]+)": _Handler.tag,
    f"DELETE /api/models/{_NAME}/tag/([^/]+)": _Handler.untag,
}
