"""The client of the API server: requests with a timeout, typed errors, and guarded writes.

`cluster.py` uses it for the loop, `cluster_progress.py` for the status server and `cluster_admission.py` for the
webhook; `main.py` creates it. It has no policy, no cache and no log.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.template_reference import TemplateKind

if TYPE_CHECKING:
    # Its models take seconds to load, and only their names are needed here.
    from kubernetes.aio.client import ApiClient

JOBS = f"/apis/{constants.GROUP}/{constants.VERSION}/namespaces/{{namespace}}/{constants.PLURAL}"
TEMPLATES = {
    TemplateKind.NAMESPACED: f"/apis/{constants.GROUP}/{constants.VERSION}/namespaces/{{namespace}}/ppojobtemplates",
    TemplateKind.CLUSTER: f"/apis/{constants.GROUP}/{constants.VERSION}/clusterppojobtemplates",
}
_MAX_RACES = 5
_MAX_WORDS = 2000
_COME_AGAIN = (429, 503, 504)
_NAMESPACE_TERMINATING = "NamespaceTerminating"
"""Cause in the API server's answer."""

RawObject = Mapping[str, Any]
"""An object of the API server as decoded JSON."""
StatusOf = Callable[[RawObject], RawObject | None]
"""Maps the live object to the part of its status to write. None: write nothing."""


class ApiError(Exception):
    """The request failed; the message includes the API server's own."""

    is_in_status = False
    """Whether the status of the job that it is about says it already."""


class ApiUnavailable(ApiError):
    """No answer, or a request to retry: the same call may succeed later."""


class ApiFailed(ApiUnavailable):
    """The API server or a webhook failed (status 500 and above). The same call may succeed later.

    Server-side apply also returns this for fields of wrong types and for duplicate keys.
    """


class ApiRefused(ApiError):
    """The request was rejected: it, or the operator's permissions, must change."""


class NamespaceTerminatingError(ApiRefused):
    """Nothing can be created in the namespace any more, because it is being deleted with everything in it."""


@dataclass(frozen=True)
class Answer:
    """A response, other than a request to retry."""

    status: int
    """The HTTP status."""
    body: Any
    """Decoded JSON, or text if it is not JSON."""

    @property
    def message(self) -> str:
        """Status code and message of the API server."""
        message = self.body.get("message") if isinstance(self.body, Mapping) else None
        return f"{self.status} {message or repr(self.body)}"[:_MAX_WORDS]

    def expect(self, *statuses: int) -> dict[str, Any]:
        """Return the body of a response with one of the statuses.

        Raises:
            ApiRefused: it has another status.
            NamespaceTerminatingError: because the namespace is being deleted.
        """
        if self.status in statuses and isinstance(self.body, dict):
            return self.body
        raise NamespaceTerminatingError(self.message) if self._is_of_terminating_namespace else ApiRefused(self.message)

    @property
    def _is_of_terminating_namespace(self) -> bool:
        details = self.body.get("details") if isinstance(self.body, Mapping) else None
        causes = (details or {}).get("causes") or ()
        return any(cause.get("reason") == _NAMESPACE_TERMINATING for cause in causes)


class ApiServer:
    """The API server. Paths are templates, so that a name from outside cannot change the path."""

    def __init__(
        self,
        client: "ApiClient",
        *,
        timeout: float,
        guard: Callable[[], None] = lambda: None,
        count: Callable[[str, str, str], None] = lambda method, resource, code: None,
    ) -> None:
        """Use a client.

        Args:
            client: the connection.
            timeout: of one call, in seconds.
            guard: called before each write; if it raises, nothing is sent.
            count: called after each request with its method, the resource, and the HTTP status or `error`.
        """
        self._client = client
        self._timeout = timeout
        self._guard = guard
        self._count = count

    def guarded(self, guard: Callable[[], None]) -> "ApiServer":
        """Return the same connection with another guard."""
        return ApiServer(self._client, timeout=self._timeout, guard=guard, count=self._count)

    async def read(self, collection: str, namespace: str, name: str, *, may_lag: bool = False) -> RawObject | None:
        """Return an object, or None if there is none.

        With `may_lag`, it comes from the API server's watch cache, which may lag behind etcd by moments.
        """
        query = {"resourceVersion": "0"} if may_lag else None
        answer = await self.call("GET", f"{collection}/{{name}}", namespace, name, query=query)
        return None if answer.status == 404 else answer.expect(200)

    async def create(self, collection: str, manifest: RawObject) -> bool:
        """Create an object; False if the name exists."""
        answer = await self.call("POST", collection, manifest["metadata"]["namespace"], body=manifest)
        if answer.status == 409:
            return False
        answer.expect(201)
        return True

    async def replace(self, collection: str, manifest: RawObject) -> bool:
        """Replace an object; False if it changed since it was read (by its resourceVersion) or was deleted."""
        metadata = manifest["metadata"]
        path = f"{collection}/{{name}}"
        answer = await self.call("PUT", path, metadata["namespace"], metadata["name"], body=manifest)
        if answer.status in (404, 409):
            return False
        answer.expect(200)
        return True

    async def apply_status(self, namespace: str, name: str, uid: str, *, status_of: StatusOf, manager: str) -> bool:
        """Apply a field manager's part of a PPOJob's status; False if the object was deleted or re-created.

        The API server ignores a uid in the body of a status request. So the object is read first, and its
        resourceVersion makes the API server refuse the write (409) if the object was changed or re-created since.

        Args:
            namespace: of the PPOJob.
            name: of the PPOJob.
            uid: of the PPOJob.
            status_of: called with the live object at each try.
            manager: the field manager.

        Raises:
            ApiUnavailable: the object changed during each try.
        """
        for _ in range(_MAX_RACES):
            current = await self.read(JOBS, namespace, name)
            if current is None or current["metadata"]["uid"] != uid:
                return False
            status = status_of(current)
            if status is None:
                return True
            metadata = {key: current["metadata"][key] for key in ("namespace", "name", "resourceVersion")}
            answer = await self.call(
                "PATCH",
                f"{JOBS}/{{name}}/status",
                namespace,
                name,
                body={
                    "apiVersion": constants.API_VERSION,
                    "kind": constants.KIND,
                    "metadata": metadata,
                    "status": status,
                },
                query={"fieldManager": manager, "force": "true"},
            )
            if answer.status not in (404, 409):
                answer.expect(200)
                return True
        raise ApiUnavailable(f"PPOJob {namespace}/{name} changed {_MAX_RACES} times while its status was being written")

    async def call(
        self,
        method: str,
        path: str,
        namespace: str = "",
        name: str = "",
        *,
        body: RawObject | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request and return its response, whatever its status. A PATCH is a server-side apply.

        Args:
            path: {namespace} and {name} are filled in.

        Raises:
            ApiUnavailable: there was no response, or a request to retry.
            ApiFailed: the response is a server error.
        """
        if method != "GET":
            self._guard()
        content_type = "application/apply-patch+yaml" if method == "PATCH" else "application/json"
        # Without the body: it is plain JSON already, and the client's inspection of each value takes most of the time.
        _, url, headers, _, _ = await self._client.param_serialize(
            method,
            path,
            path_params={"namespace": namespace, "name": name},
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        where, code = f"{method} {path.format(namespace=namespace, name=name)}", "error"
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.call_api(method, url, headers, body, _request_timeout=self._timeout)
                data: bytes = await response.read()  # type: ignore[no-untyped-call]
                code = str(response.status)
        except TimeoutError as error:
            raise ApiUnavailable(f"{where}: no answer within {self._timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise ApiUnavailable(f"{where}: {type(error).__name__} {error}") from error
        finally:
            self._count(method, _resource(path), code)
        answer = Answer(response.status, _decode(data))
        if answer.status in _COME_AGAIN:
            raise ApiUnavailable(f"{where}: {answer.message}")
        if answer.status >= 500:
            raise ApiFailed(f"{where}: {answer.message}")
        return answer


def _resource(path: str) -> str:
    """Return the resource of a path template, such as `pods` or `ppojobs/status`."""
    parts = [part for part in path.split("/") if part and not part.startswith("{") and part != "namespaces"]
    group_and_version = 2 if parts[0] == "api" else 3
    return "/".join(parts[group_and_version:]) or "namespaces"


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data[:_MAX_WORDS].decode(errors="replace")
