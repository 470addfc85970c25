"""The API server as the loop needs it: reads, server-side apply, the status, deletions and Events.

The only module of the operator's core that talks to the API server. Every read is a fresh one, by name or by the job's
label, so that a decision never rests on an index that lags. It decides nothing and never logs.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient

from ppojob_api.v1alpha1 import constants
from ppojob_operator.manifests import naming
from ppojob_operator.plan import EventRecord, Job, JobKey, Manifest

_JOBS = f"/apis/{constants.GROUP}/{constants.VERSION}/namespaces/{{namespace}}/{constants.PLURAL}"
_ALL_JOBS = f"/apis/{constants.GROUP}/{constants.VERSION}/{constants.PLURAL}"
_CLUSTERS = "/apis/ray.io/v1/namespaces/{namespace}/rayclusters"
_PODS = "/api/v1/namespaces/{namespace}/pods"
_CLAIMS = "/api/v1/namespaces/{namespace}/persistentvolumeclaims"
_EVENTS = "/api/v1/namespaces/{namespace}/events"
_COLLECTIONS = {
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "RayCluster": _CLUSTERS,
}

_APPLY = {"fieldManager": constants.FIELD_MANAGER_OPERATOR, "force": "true"}
_SCHEMA_VIOLATION = "field not declared in schema"
_MAX_NOTE = 1000
_CONTROLLER = f"{constants.GROUP}/operator"


class ClusterError(Exception):
    """The API server did not do what was asked; the message has its words."""


class ClusterUnavailable(ClusterError):
    """It did not answer or asked for patience: the same call may succeed later."""


class ClusterRefused(ClusterError):
    """It refused the call for good: something in the request, or in the operator's rights, has to change."""


@dataclass(frozen=True)
class _Answer:
    status: int
    body: Any

    @property
    def words(self) -> str:
        """The API server's own words."""
        message = self.body.get("message") if isinstance(self.body, Mapping) else None
        return f"{self.status} {message or self.body!r}"[:2000]


class Cluster:
    """The API server, for the operator's core."""

    def __init__(self, client: ApiClient, *, reporter: str, timeout: float) -> None:
        """`reporter` is the name of the operator's pod, for Events; `timeout` of one call is in seconds."""
        self._client = client
        self._reporter = reporter
        self._timeout = timeout

    async def read_job(self, key: JobKey) -> Manifest | None:
        """Return the PPOJob, or None if there is none."""
        return await self._read(_JOBS, key.namespace, key.name)

    async def list_jobs(self, namespace: str) -> list[Manifest]:
        """Return the PPOJobs of a namespace, or of all namespaces if it is empty."""
        path = _JOBS.format(namespace=namespace) if namespace else _ALL_JOBS
        return _items(_expect(await self._call("GET", path), 200))

    async def serves_jobs(self, namespace: str) -> bool:
        """Return whether the API server knows PPOJobs, asked in a namespace or, if it is empty, in all."""
        return await self._is_served(_JOBS.format(namespace=namespace) if namespace else _ALL_JOBS)

    async def serves_clusters(self, namespace: str) -> bool:
        """Return whether the API server knows RayClusters."""
        return await self._is_served(_CLUSTERS.format(namespace=namespace))

    async def list_clusters(self, key: JobKey) -> list[Manifest] | None:
        """Return the job's RayClusters, or None if the API server does not know RayClusters at all."""
        answer = await self._list(_CLUSTERS, key)
        return None if answer.status == 404 else _items(_expect(answer, 200))

    async def list_pods(self, key: JobKey) -> list[Manifest]:
        """Return the job's Ray pods."""
        return _items(_expect(await self._list(_PODS, key), 200))

    async def read_claim(self, namespace: str, name: str) -> Manifest | None:
        """Return the PersistentVolumeClaim, or None if there is none."""
        return await self._read(_CLAIMS, namespace, name)

    async def read_config(self, key: JobKey) -> Mapping[str, str] | None:
        """Return the data of the job's ConfigMap, or None if there is none."""
        raw = await self._read(_COLLECTIONS["ConfigMap"], key.namespace, naming.config_map_name(key.name))
        return None if raw is None else raw.get("data", {})

    async def apply(self, manifest: Manifest) -> None:
        """Make the object as the manifest says. A Secret is only ever made, never changed or read."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        path = _COLLECTIONS[kind].format(namespace=metadata["namespace"])
        if kind == "Secret":
            answer = await self._call("POST", path, body=manifest)
            if answer.status != 409:
                _expect(answer, 201)
            return
        answer = await self._call("PATCH", f"{path}/{metadata['name']}", body=manifest, query=_APPLY)
        _expect(answer, 200, 201)

    async def write_status(self, job: Job, status: Mapping[str, Any]) -> bool:
        """Write the operator's part of the status; False if that object is gone.

        The uid makes the API server refuse (409) a later object of the same name.
        """
        metadata = {"namespace": job.key.namespace, "name": job.key.name, "uid": job.uid}
        body = {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": metadata, "status": status}
        path = f"{_JOBS.format(namespace=job.key.namespace)}/{job.key.name}/status"
        answer = await self._call("PATCH", path, body=body, query=_APPLY)
        if answer.status in (404, 409):
            return False
        _expect(answer, 200)
        return True

    async def delete_cluster(self, namespace: str, name: str) -> None:
        """Delete a RayCluster with its pods; it is no error if it is gone."""
        await self._delete(f"{_CLUSTERS.format(namespace=namespace)}/{name}", {})

    async def delete_job(self, job: Job) -> None:
        """Delete the PPOJob, if it is still the same object, with everything that it owns."""
        path = f"{_JOBS.format(namespace=job.key.namespace)}/{job.key.name}"
        await self._delete(path, {"preconditions": {"uid": job.uid}})

    async def emit(self, job: Job, event: EventRecord) -> None:
        """Write an Event about the job. The same words about the same attempt are written once."""
        said = f"{job.uid}/{job.status.attempt}/{event.action}/{event.reason}/{event.message}"
        name = f"{job.key.name}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        regarding = {
            "apiVersion": constants.API_VERSION,
            "kind": constants.KIND,
            "namespace": job.key.namespace,
            "name": job.key.name,
            "uid": job.uid,
        }
        # core/v1 and not events.k8s.io: `kubectl describe` sorts by lastTimestamp, which only core/v1 lets one set.
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": job.key.namespace},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "type": "Warning" if event.is_warning else "Normal",
            "reason": event.reason,
            "action": event.action,
            "message": event.message[:_MAX_NOTE],
            "source": {"component": _CONTROLLER},
            "reportingComponent": _CONTROLLER,
            "reportingInstance": self._reporter,
            "involvedObject": regarding,
        }
        answer = await self._call("POST", _EVENTS.format(namespace=job.key.namespace), body=body)
        if answer.status != 409:
            _expect(answer, 201)

    async def _read(self, collection: str, namespace: str, name: str) -> Manifest | None:
        answer = await self._call("GET", f"{collection.format(namespace=namespace)}/{name}")
        return None if answer.status == 404 else _expect(answer, 200)

    async def _is_served(self, collection: str) -> bool:
        answer = await self._call("GET", collection, query={"limit": "1"})
        if answer.status == 404:
            return False
        _expect(answer, 200)
        return True

    async def _list(self, collection: str, key: JobKey) -> _Answer:
        query = {"labelSelector": f"{constants.LABEL_JOB}={key.name}"}
        return await self._call("GET", collection.format(namespace=key.namespace), query=query)

    async def _delete(self, path: str, options: Mapping[str, Any]) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background", **options}
        answer = await self._call("DELETE", path, body=body)
        if answer.status not in (404, 409):
            _expect(answer, 200, 202)

    async def _call(
        self, method: str, path: str, *, body: Manifest | None = None, query: Mapping[str, str] | None = None
    ) -> _Answer:
        """Send one request and return its answer, whatever its status.

        Raises:
            ClusterUnavailable: there was no answer, or one that asks to come again.
        """
        content_type = "application/apply-patch+yaml" if method == "PATCH" else "application/json"
        request = await self._client.param_serialize(
            method,
            path,
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
            raise ClusterUnavailable(f"{method} {path}: no answer within {self._timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise ClusterUnavailable(f"{method} {path}: {type(error).__name__} {error}") from error
        answer = _Answer(response.status, _decode(data))
        if answer.status == 500 and _SCHEMA_VIOLATION in answer.words:
            raise ClusterRefused(answer.words)
        if answer.status == 429 or answer.status >= 500:
            raise ClusterUnavailable(f"{method} {path}: {answer.words}")
        return answer


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data[:500].decode(errors="replace")


def _items(body: Mapping[str, Any]) -> list[Manifest]:
    return list(body.get("items", []))


def _expect(answer: _Answer, *statuses: int) -> dict[str, Any]:
    """Return the body of an answer with one of the statuses.

    Raises:
        ClusterRefused: it has another one.
    """
    if answer.status not in statuses or not isinstance(answer.body, dict):
        raise ClusterRefused(answer.words)
    return answer.body
