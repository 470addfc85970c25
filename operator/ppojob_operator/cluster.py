"""The loop's view of the API server: reads, server-side apply, status writes, deletions and Events.

The loop uses no other way to the API server. Every read is consistent, by name or by the job's label, so that no
decision is based on an outdated index. This module has no policy and no log.
"""

import contextlib
import hashlib
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.template_reference import TemplateKind, TemplateRef
from ppojob_operator.api_server import (
    JOBS,
    TEMPLATES,
    Answer,
    ApiError,
    ApiFailed,
    ApiRefused,
    ApiServer,
    ApiUnavailable,
)
from ppojob_operator.manifests import naming, queues
from ppojob_operator.manifests.ray_cluster import with_job_fields
from ppojob_operator.manifests.trials import trials
from ppojob_operator.plan import EventRecord, Job, JobKey, Manifest

_ALL_JOBS = f"/apis/{constants.GROUP}/{constants.VERSION}/{constants.PLURAL}"
_CLUSTERS = "/apis/ray.io/v1/namespaces/{namespace}/rayclusters"
_WORKLOADS = tuple(
    f"/apis/kueue.x-k8s.io/{version}/namespaces/{{namespace}}/workloads" for version in constants.KUEUE_VERSIONS
)
_PODS = "/api/v1/namespaces/{namespace}/pods"
_CLAIMS = "/api/v1/namespaces/{namespace}/persistentvolumeclaims"
_FETCH_JOBS = "/apis/batch/v1/namespaces/{namespace}/jobs"
_EVENTS = "/api/v1/namespaces/{namespace}/events"
_NAMESPACES = "/api/v1/namespaces"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
_COLLECTIONS = {
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Secret": "/api/v1/namespaces/{namespace}/secrets",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "RayCluster": _CLUSTERS,
    "Job": _FETCH_JOBS,
}

_APPLY = {"fieldManager": constants.FIELD_MANAGER_OPERATOR, "force": "true"}
_DRY_RUN = {"dryRun": "All"}
_MAX_MESSAGE = 1000
_MAX_RACES = 5
_CONTROLLER = f"{constants.GROUP}/operator"


class Cluster:
    """The API server, for the loop."""

    def __init__(self, api: ApiServer, *, reporter: str) -> None:
        """`reporter` is the name of the operator's pod, for Events."""
        self._api = api
        self._reporter = reporter

    async def read_job(self, key: JobKey) -> Manifest | None:
        """Return the PPOJob, or None if there is none."""
        return await self._api.read(JOBS, key.namespace, key.name)

    async def list_jobs(self, namespace: str) -> list[Manifest]:
        """Return the PPOJobs of a namespace, or of all namespaces if it is empty."""
        answer = await self._api.call("GET", JOBS if namespace else _ALL_JOBS, namespace)
        return _items(answer.expect(200))

    async def list_namespaces(self, selector: str) -> list[str]:
        """Return the names of the namespaces whose labels match a selector."""
        answer = await self._api.call("GET", _NAMESPACES, query={"labelSelector": selector})
        return [raw["metadata"]["name"] for raw in _items(answer.expect(200))]

    async def serves_jobs(self, namespace: str) -> bool:
        """Return whether the API server serves PPOJobs in a namespace, or in all namespaces if it is empty."""
        return await self._is_served(JOBS if namespace else _ALL_JOBS, namespace)

    async def serves_clusters(self, namespace: str) -> bool:
        """Return whether the API server serves RayClusters."""
        return await self._is_served(_CLUSTERS, namespace)

    async def list_clusters(self, key: JobKey) -> list[Manifest] | None:
        """Return the job's RayClusters, or None if the API server does not serve RayClusters."""
        answer = await self._list(_CLUSTERS, key)
        return None if answer.status == 404 else _items(answer.expect(200))

    async def list_workloads(self, key: JobKey, owners: Collection[str]) -> list[Manifest] | None:
        """Return Kueue's Workloads of RayClusters (by UID), or None if the API server does not serve Workloads."""
        query = {"labelSelector": f"{constants.LABEL_QUEUED_UID} in ({','.join(sorted(owners)) or 'none'})"}
        for collection in _WORKLOADS:
            answer = await self._api.call("GET", collection, key.namespace, query=query)
            if answer.status != 404:
                return _items(answer.expect(200))
        return None

    async def list_pods(self, key: JobKey) -> list[Manifest]:
        """Return the job's pods: Ray's, and those that fetch models and data."""
        return _items((await self._list(_PODS, key)).expect(200))

    async def read_fetch_job(self, key: JobKey) -> Manifest | None:
        """Return the Job that fetches the job's models and data, or None if there is none."""
        return await self._api.read(_FETCH_JOBS, key.namespace, naming.fetch_job_name(key.name))

    async def read_claim(self, namespace: str, name: str) -> Manifest | None:
        """Return the PersistentVolumeClaim, or None if there is none."""
        return await self._api.read(_CLAIMS, namespace, name)

    async def read_template(self, ref: TemplateRef, namespace: str) -> Manifest | None:
        """Return the template that a spec names, or None if there is none."""
        is_namespaced = ref.kind is TemplateKind.NAMESPACED
        return await self._api.read(TEMPLATES[ref.kind], namespace if is_namespaced else "", ref.name)

    async def read_config(self, key: JobKey) -> Mapping[str, str] | None:
        """Return the data of the job's ConfigMap, or None if there is none."""
        raw = await self._api.read(_COLLECTIONS["ConfigMap"], key.namespace, naming.config_map_name(key.name))
        return None if raw is None else raw.get("data", {})

    async def apply(self, manifest: Manifest) -> None:
        """Create or update the object by server-side apply. A Secret is created only, never read or changed.

        Raises:
            ApiRefused: the API server rejects it, or an object of another owner has the name.
            ApiUnavailable: the object of an earlier job with this name still exists, or Kueue changed the object.
        """
        kind, metadata = manifest["kind"], manifest["metadata"]
        path, namespace = _COLLECTIONS[kind], metadata["namespace"]
        if kind == "Secret":
            # An existing one was created by an interrupted reconcile: nobody else can predict its name.
            await self._api.create(path, manifest)
            return
        found = await self._api.read(path, namespace, metadata["name"])
        [owner] = metadata["ownerReferences"]
        if found is not None and not naming.is_owned(found, owner["uid"]):
            raise _taken(kind, found, owner)
        if found is not None and kind == "RayCluster":
            manifest = queues.with_kueue_fields(manifest, found)
        if (await self._patch(manifest, _APPLY)).status == 409:
            raise ApiUnavailable(f"{kind} {metadata['name']} changed while it was being written")

    async def dry_run(self, cluster: Manifest) -> str:
        """Try a RayCluster and its pods without storing them; return why the API server rejects one, or "".

        Raises:
            ApiUnavailable: it did not answer.
        """
        for trial in trials(cluster):
            try:
                if trial.group is not None:
                    namespace = trial.manifest["metadata"]["namespace"]
                    answer = await self._api.call("POST", _PODS, namespace, body=trial.manifest, query=_DRY_RUN)
                else:
                    answer = await self._patch(trial.manifest, {**_APPLY, **_DRY_RUN})
                answer.expect(200, 201)
            except (ApiRefused, ApiFailed) as error:
                if words := trial.refusal(str(error)):
                    return words
        return ""

    async def read_lease(self, namespace: str, name: str) -> Manifest | None:
        """Return the Lease of an operator, or None if there is none."""
        return await self._api.read(_LEASES, namespace, name)

    async def write_status(self, job: Job, status: Mapping[str, Any]) -> bool:
        """Write the operator's part of the status; False if the object was deleted or re-created.

        Raises:
            ApiUnavailable: the job's owner changed since it was read.
        """
        key, before = job.key, _owner(job.status.to_wire())

        def status_of(current: Manifest) -> Manifest:
            if _owner(current.get("status", {})) != before:
                raise ApiUnavailable(
                    f"PPOJob {key} was handed over to another operator while its status was being written"
                )
            return {**job.unknown, **status}

        manager = constants.FIELD_MANAGER_OPERATOR
        return await self._api.apply_status(key.namespace, key.name, job.uid, status_of=status_of, manager=manager)

    async def delete_cluster(self, namespace: str, name: str) -> None:
        """Delete a RayCluster with its pods; no error if it does not exist."""
        await self._delete(_CLUSTERS, namespace, name, {})

    async def delete_secret(self, namespace: str, name: str) -> None:
        """Delete the Secret of a RayCluster; no error if it does not exist, or if the operator may not delete Secrets.

        Without the chart's admission policy, it may not. The Secret is then deleted with its PPOJob.
        """
        with contextlib.suppress(ApiRefused):
            await self._delete(_COLLECTIONS["Secret"], namespace, name, {})

    async def delete_fetch_job(self, key: JobKey) -> None:
        """Delete the Job that fetches models and data, with its pods; it is no error if it is gone."""
        await self._delete(_FETCH_JOBS, key.namespace, naming.fetch_job_name(key.name), {})

    async def delete_job(self, job: Job) -> None:
        """Delete the PPOJob, if its uid is the same, with everything that it owns."""
        await self._delete(JOBS, job.key.namespace, job.key.name, {"preconditions": {"uid": job.uid}})

    async def emit(self, job: Job, event: EventRecord) -> None:
        """Emit an Event about the job. Repetitions within an attempt increase the count of one Event."""
        content = f"{job.uid}/{job.status.attempt}/{event.action}/{event.reason}/{event.message}"
        name = f"{job.key.name}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        regarding = {
            "apiVersion": constants.API_VERSION,
            "kind": constants.KIND,
            "namespace": job.key.namespace,
            "name": job.key.name,
            "uid": job.uid,
        }
        # core/v1 rather than events.k8s.io: `kubectl describe` sorts by lastTimestamp, which only core/v1 can set.
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
            "message": event.message[:_MAX_MESSAGE],
            "source": {"component": _CONTROLLER},
            "reportingComponent": _CONTROLLER,
            "reportingInstance": self._reporter,
            "involvedObject": regarding,
        }
        if not await self._api.create(_EVENTS, body):
            await self._count_again(job.key.namespace, name, now)

    async def _count_again(self, namespace: str, name: str, now: str) -> None:
        for _ in range(_MAX_RACES):
            found = await self._api.read(_EVENTS, namespace, name)
            if found is None:  # It has expired.
                return
            counted = {**found, "count": found.get("count", 1) + 1, "lastTimestamp": now}
            if await self._api.replace(_EVENTS, counted):
                return

    async def _is_served(self, collection: str, namespace: str) -> bool:
        answer = await self._api.call("GET", collection, namespace, query={"limit": "1"})
        if answer.status == 404:
            return False
        answer.expect(200)
        return True

    async def _list(self, collection: str, key: JobKey) -> Answer:
        query = {"labelSelector": f"{constants.LABEL_JOB}={key.name}"}
        return await self._api.call("GET", collection, key.namespace, query=query)

    async def _patch(self, manifest: Manifest, query: Mapping[str, str]) -> Answer:
        """Apply an object; return the answer, which may be a conflict (409)."""
        metadata, path = manifest["metadata"], f"{_COLLECTIONS[manifest['kind']]}/{{name}}"
        try:
            answer = await self._api.call(
                "PATCH", path, metadata["namespace"], metadata["name"], body=manifest, query=query
            )
            if answer.status != 409:
                answer.expect(200, 201)
        except (ApiRefused, ApiFailed) as error:
            raise type(error)(with_job_fields(str(error))) from error
        return answer

    async def _delete(self, collection: str, namespace: str, name: str, options: Mapping[str, Any]) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background", **options}
        answer = await self._api.call("DELETE", f"{collection}/{{name}}", namespace, name, body=body)
        if answer.status not in (404, 409):
            answer.expect(200, 202)


def _taken(kind: str, found: Manifest, ours: Mapping[str, Any]) -> ApiError:
    metadata = found["metadata"]
    others = metadata.get("ownerReferences", [])
    if any(other.get("controller") and _named(other) == _named(ours) for other in others):
        return ApiUnavailable(f"{kind} {metadata['name']} of an earlier PPOJob of this name is still being deleted")
    whose = ", ".join(f"{_named(other)} (uid {other['uid']})" for other in others) or "nobody"
    return ApiRefused(
        f"{kind} {metadata['name']} exists and belongs to {whose}: the operator does not take over objects that "
        "it has not created; delete it, or give the PPOJob another name"
    )


def _owner(status: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the operator in a status, without its version."""
    operator = status.get("operator")
    return None if operator is None else (operator["namespace"], operator["lease"])


def _named(owner: Mapping[str, Any]) -> str:
    return f"{owner['kind']} {owner['name']}"


def _items(body: Mapping[str, Any]) -> list[Manifest]:
    return list(body.get("items", []))
