"""The API server as the status server needs it: token reviews, reads, the reports' part of the status, one Secret.

It implements `status_server.ports` over `kubernetes.aio`; `main.py` hands it over. It keeps nothing: a caller that has
an index of pods or jobs overrides `read_pod` and `read_job`. It decides nothing and never logs.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient

from ppojob_api.v1alpha1 import constants
from ppojob_operator.status_server.ports import ApiRefused, ApiUnavailable, JobIdentity, RawObject, TokenIdentity

_JOBS = f"/apis/{constants.GROUP}/{constants.VERSION}/namespaces/{{namespace}}/{constants.PLURAL}/{{name}}"
_PODS = "/api/v1/namespaces/{namespace}/pods/{name}"
_SECRETS = "/api/v1/namespaces/{namespace}/secrets"
_MAX_RACES = 5
_SCHEMA_VIOLATION = "field not declared in schema"
_POD_NAME = "authentication.kubernetes.io/pod-name"
_POD_UID = "authentication.kubernetes.io/pod-uid"


@dataclass(frozen=True)
class _Answer:
    status: int
    body: Any

    @property
    def reason(self) -> str:
        """The API server's own words."""
        message = self.body.get("message") if isinstance(self.body, Mapping) else None
        return f"{self.status} {message or self.body!r}"[:1000]


class ProgressCluster:
    """ProgressPort and SecretPort on a real API server."""

    def __init__(self, client: ApiClient, *, timeout_seconds: float = 10.0) -> None:
        self._client = client
        self._timeout = timeout_seconds

    async def review_token(self, token: str, audience: str) -> TokenIdentity | None:
        """Return whom the token stands for, or None if it is not valid for the audience."""
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        }
        answer = await self._call("POST", "/apis/authentication.k8s.io/v1/tokenreviews", body=review)
        status = _expect(answer, 200, 201).get("status", {})
        # Where the audience is another, the API server leaves `authenticated` out.
        if not status.get("authenticated"):
            return None
        user = status.get("user", {})
        extra = user.get("extra") or {}
        return TokenIdentity(
            username=user.get("username", ""),
            audiences=tuple(status.get("audiences") or ()),
            pod_name=next(iter(extra.get(_POD_NAME) or ()), None),
            pod_uid=next(iter(extra.get(_POD_UID) or ()), None),
        )

    async def read_pod(self, namespace: str, name: str) -> RawObject | None:
        """Return the pod, or None if there is none."""
        return await self._read(_PODS, namespace, name)

    async def read_job(self, namespace: str, name: str) -> RawObject | None:
        """Return the PPOJob, or None if there is none."""
        return await self._read(_JOBS, namespace, name)

    async def apply_progress(self, key: JobIdentity, status: RawObject) -> bool:
        """Apply the reports' part of the status; False if that object is gone.

        A uid in the body guards nothing: on the status the API server takes any. So the object is looked at first, and
        its resourceVersion makes the API server refuse (409) one that changed or was made anew in between.
        """
        for _ in range(_MAX_RACES):
            current = await self.read_job(key.namespace, key.name)
            if current is None or current["metadata"]["uid"] != key.uid:
                return False
            if await self._apply_to(current, status):
                return True
        raise ApiUnavailable(f"PPOJob {key} changed {_MAX_RACES} times while its status was being written")

    async def _apply_to(self, current: RawObject, status: RawObject) -> bool:
        """Apply the status to the object as it was read; False if it has changed since."""
        metadata = {name: current["metadata"][name] for name in ("namespace", "name", "resourceVersion")}
        answer = await self._call(
            "PATCH",
            f"{_JOBS}/status",
            metadata["namespace"],
            metadata["name"],
            body={"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": metadata, "status": status},
            query={"fieldManager": constants.FIELD_MANAGER_PROGRESS, "force": "true"},
        )
        if answer.status in (404, 409):
            return False
        _expect(answer, 200)
        return True

    async def read_secret(self, namespace: str, name: str) -> RawObject | None:
        """Return the Secret, or None if there is none."""
        return await self._read(f"{_SECRETS}/{{name}}", namespace, name)

    async def create_secret(self, secret: RawObject) -> bool:
        """Create the Secret; False if there is one already."""
        return await self._put_secret("POST", _SECRETS, secret, created=201)

    async def replace_secret(self, secret: RawObject) -> bool:
        """Replace the Secret; False if it changed since it was read, or is gone."""
        return await self._put_secret("PUT", f"{_SECRETS}/{{name}}", secret, created=200)

    async def _put_secret(self, method: str, path: str, secret: RawObject, *, created: int) -> bool:
        metadata = secret["metadata"]
        answer = await self._call(method, path, metadata["namespace"], metadata["name"], body=secret)
        if answer.status == 409 or (method == "PUT" and answer.status == 404):
            return False
        _expect(answer, created)
        return True

    async def _read(self, path: str, namespace: str, name: str) -> RawObject | None:
        answer = await self._call("GET", path, namespace, name)
        if answer.status == 404:
            return None
        return _expect(answer, 200)

    async def _call(
        self,
        method: str,
        path: str,
        namespace: str = "",
        name: str = "",
        *,
        body: RawObject | None = None,
        query: Mapping[str, str] | None = None,
    ) -> _Answer:
        """Send one request and read its answer, whatever its status.

        Raises:
            ApiUnavailable: no answer, or one that asks to come again.
        """
        content_type = "application/apply-patch+yaml" if method == "PATCH" else "application/json"
        request = await self._client.param_serialize(
            method,
            path,
            path_params={"namespace": namespace, "name": name},
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.call_api(*request, _request_timeout=self._timeout)
                data: bytes = await response.read()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise ApiUnavailable(f"{method} {path}: no answer within {self._timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise ApiUnavailable(f"{method} {path}: {type(error).__name__} {error}") from error
        answer = _Answer(response.status, _decode(data))
        if answer.status == 500 and _SCHEMA_VIOLATION in answer.reason:
            raise ApiRefused(answer.reason)
        if answer.status == 429 or answer.status >= 500:
            raise ApiUnavailable(f"{method} {path}: {answer.reason}")
        return answer


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data[:200].decode(errors="replace")


def _expect(answer: _Answer, *statuses: int) -> dict[str, Any]:
    """Return the body of an answer with one of the statuses.

    Raises:
        ApiRefused: it has another one.
    """
    if answer.status not in statuses or not isinstance(answer.body, dict):
        raise ApiRefused(answer.reason)
    return answer.body
