"""The API server over one connection: requests with a limit, answers in its own words, a status written with a guard.

`cluster.py` asks through it for the loop and `cluster_progress.py` for the status server; `main.py` makes it. It knows
no policy, keeps nothing and never logs.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from ppojob_api.v1alpha1 import constants

if TYPE_CHECKING:
    # Its models take seconds to load, and only their names are needed here.
    from kubernetes.aio.client import ApiClient

JOBS = f"/apis/{constants.GROUP}/{constants.VERSION}/namespaces/{{namespace}}/{constants.PLURAL}"
_MAX_RACES = 5
_MAX_WORDS = 2000
_COME_AGAIN = (429, 503, 504)

RawObject = Mapping[str, Any]
"""An object of the API server as decoded JSON."""
StatusOf = Callable[[RawObject], RawObject | None]
"""From an object as it stands to the part of its status that is written; None: nothing is to be written."""


class ApiError(Exception):
    """The API server did not do what was asked; the message has its words."""


class ApiUnavailable(ApiError):
    """It did not answer or asked for patience: the same call may succeed later."""


class ApiFailed(ApiUnavailable):
    """It answered with a failure of its own or of a webhook, which its words name. The same call may succeed later.

    Server-side apply also answers so to an object with fields of wrong types or with duplicate keys.
    """


class ApiRefused(ApiError):
    """It refused the call for good: something in the request, or in the operator's rights, has to change."""


@dataclass(frozen=True)
class Answer:
    """An answer that is not a plea for patience."""

    status: int
    """The HTTP status."""
    body: Any
    """Decoded JSON; text where it is none."""

    @property
    def message(self) -> str:
        """The API server's own words."""
        message = self.body.get("message") if isinstance(self.body, Mapping) else None
        return f"{self.status} {message or repr(self.body)}"[:_MAX_WORDS]

    def expect(self, *statuses: int) -> dict[str, Any]:
        """Return the body of an answer with one of the statuses.

        Raises:
            ApiRefused: it has another one.
        """
        if self.status not in statuses or not isinstance(self.body, dict):
            raise ApiRefused(self.message)
        return self.body


class ApiServer:
    """The API server. Paths are templates, so that a name from outside cannot lead to another path."""

    def __init__(self, client: "ApiClient", *, timeout: float, guard: Callable[[], None] = lambda: None) -> None:
        """Speak through a client.

        Args:
            client: the connection.
            timeout: of one call, in seconds.
            guard: called before each call that changes something; what it raises is raised, and nothing is sent.
        """
        self._client = client
        self._timeout = timeout
        self._guard = guard

    def guarded(self, guard: Callable[[], None]) -> "ApiServer":
        """Return the same connection with another guard."""
        return ApiServer(self._client, timeout=self._timeout, guard=guard)

    async def read(self, collection: str, namespace: str, name: str, *, may_lag: bool = False) -> RawObject | None:
        """Return an object, or None if there is none.

        With `may_lag` it comes from the API server's own memory, which is behind the store by moments.
        """
        query = {"resourceVersion": "0"} if may_lag else None
        answer = await self.call("GET", f"{collection}/{{name}}", namespace, name, query=query)
        return None if answer.status == 404 else answer.expect(200)

    async def create(self, collection: str, manifest: RawObject) -> bool:
        """Create an object; False if there is one of its name already."""
        answer = await self.call("POST", collection, manifest["metadata"]["namespace"], body=manifest)
        if answer.status == 409:
            return False
        answer.expect(201)
        return True

    async def replace(self, collection: str, manifest: RawObject) -> bool:
        """Replace an object; False if it changed since it was read (by its resourceVersion), or is gone."""
        metadata = manifest["metadata"]
        path = f"{collection}/{{name}}"
        answer = await self.call("PUT", path, metadata["namespace"], metadata["name"], body=manifest)
        if answer.status in (404, 409):
            return False
        answer.expect(200)
        return True

    async def apply_status(self, namespace: str, name: str, uid: str, *, status_of: StatusOf, manager: str) -> bool:
        """Apply a field manager's part of a PPOJob's status; False if that object is gone or another has its name.

        A uid in the body guards nothing: on the status the API server takes any. So the object is looked at first, and
        its resourceVersion makes the API server refuse (409) one that changed or was made anew in between.

        Args:
            namespace: of the PPOJob.
            name: of the PPOJob.
            uid: of the PPOJob.
            status_of: asked at each try with the object as it stands.
            manager: the field manager.

        Raises:
            ApiUnavailable: the object changed each time in between.
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
        """Send one request and return its answer, whatever its status; a PATCH is a server-side apply.

        Args:
            path: in it, {namespace} and {name} stand for those given.

        Raises:
            ApiUnavailable: there was no answer, or one that asks to come again.
            ApiFailed: the answer is a failure with words of its own.
        """
        if method != "GET":
            self._guard()
        content_type = "application/apply-patch+yaml" if method == "PATCH" else "application/json"
        # Without the body: it is plain JSON already, and a look through each of its values takes most of a call's time.
        _, url, headers, _, _ = await self._client.param_serialize(
            method,
            path,
            path_params={"namespace": namespace, "name": name},
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        where = f"{method} {path.format(namespace=namespace, name=name)}"
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.call_api(method, url, headers, body, _request_timeout=self._timeout)
                data: bytes = await response.read()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise ApiUnavailable(f"{where}: no answer within {self._timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise ApiUnavailable(f"{where}: {type(error).__name__} {error}") from error
        answer = Answer(response.status, _decode(data))
        if answer.status in _COME_AGAIN:
            raise ApiUnavailable(f"{where}: {answer.message}")
        if answer.status >= 500:
            raise ApiFailed(f"{where}: {answer.message}")
        return answer


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data[:_MAX_WORDS].decode(errors="replace")
