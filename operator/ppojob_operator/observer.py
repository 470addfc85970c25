"""Reads a job's objects, and caches them until a watch reports a change. `loop.py` has one Observer.

Between reconciles, a job's RayCluster and pods are cached; the PPOJob itself and Ray's dashboard are not. No index
decides: the objects were read by name or label, and a reconcile that changed something drops them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.cluster import Cluster
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Job, JobKey, Manifest, Observed, Plan, Surroundings
from ppojob_operator.reading import read_claim, read_cluster, read_fetch_job, read_workload
from ppojob_operator.reading_pods import is_fetch_pod, read_fetch_pod, read_pod
from ppojob_operator.reconcile import is_finished, needs_fetch, was_accepted


class Observer:
    """The objects of all jobs; a job is observed by one worker at a time."""

    def __init__(self, cluster: Cluster, surroundings: Callable[[JobKey], Surroundings]) -> None:
        self._cluster = cluster
        self._surroundings = surroundings
        self._cache: dict[JobKey, Observed | None] = {}
        """What the last reconcile observed. None: read it again. No entry: a watch has reported a change since."""

    def drop(self, key: JobKey) -> None:
        """Drop what is cached of a job, because something has changed or the job is deleted."""
        self._cache.pop(key, None)

    async def objects(self, job: Job) -> Observed:
        """Return the job's objects, from the cache if the job was admitted and no watch has reported a change."""
        cached = self._cache.get(job.key)
        if cached is not None and job.status.start_time is not None:
            # ConfigMap and Workloads have no watch; once there is a trainer, they can wait for the resync.
            if job.status.submission_id is not None:
                return cached
            cached = replace(cached, config=await self._cluster.read_config(job.key))
            return await self._with_workloads(job, cached)
        # If a watch reports a change from here on, it removes this entry, and the result is not cached.
        self._cache[job.key] = None
        clusters = await self._cluster.list_clusters(job.key)
        observed = Observed(
            surroundings=self._surroundings(job.key),
            is_kuberay_served=clusters is not None,
            clusters=tuple(read_cluster(raw) for raw in clusters or () if naming.is_owned(raw, job.uid)),
        )
        if job.is_deleting or is_finished(job.status):
            return observed
        pods, config, claim, fetch_job = await asyncio.gather(
            self._cluster.list_pods(job.key),
            self._cluster.read_config(job.key),
            self._read_claim(job),
            self._read_fetch_job(job),
        )
        observed = replace(
            observed,
            claim=None if claim is None else read_claim(claim),
            pods=tuple(read_pod(raw) for raw in pods if not is_fetch_pod(raw)),
            fetch_job=None if fetch_job is None else read_fetch_job(fetch_job),
            fetch_pods=tuple(read_fetch_pod(raw) for raw in pods if is_fetch_pod(raw)),
            config=config,
        )
        return await self._with_workloads(job, observed)

    async def _with_workloads(self, job: Job, observed: Observed) -> Observed:
        """Add Kueue's Workloads if the job has a queue, or if Kueue may have taken a RayCluster without one."""
        has_queue = isinstance(job.spec, PPOJobSpec) and job.spec.run_policy.queue_name is not None
        if not has_queue and not any(cluster.queue or cluster.is_suspended for cluster in observed.clusters):
            return observed
        owners = [cluster.uid for cluster in observed.clusters if cluster.uid]
        found = await self._cluster.list_workloads(job.key, owners)
        return replace(observed, workloads=None if found is None else tuple(read_workload(raw) for raw in found))

    def keep(self, job: Job, observed: Observed, plan: Plan) -> None:
        """Cache what was observed, unless this reconcile changed it."""
        is_as_found = not (
            plan.apply or plan.submission or plan.delete_clusters or plan.delete_fetch_job or plan.delete_job
        )
        if job.key in self._cache:
            keeps = is_as_found and observed.is_kuberay_served and not is_finished(job.status)
            # A layout that was refused is tried again: what the API server missed may exist by now.
            kept = replace(observed, ray=None, log_tail=None, dry_run=None, is_dry_run_unanswered=False)
            self._cache[job.key] = kept if keeps else None

    async def _read_claim(self, job: Job) -> Manifest | None:
        """Return the job's PersistentVolumeClaim, which is checked until the job is admitted."""
        if not isinstance(job.spec, PPOJobSpec) or was_accepted(job):
            return None
        return await self._cluster.read_claim(job.key.namespace, job.spec.storage.claim_name)

    async def _read_fetch_job(self, job: Job) -> Manifest | None:
        """Return the Job that fetches, as long as it matters. Another owner's is none of ours: `apply` names it."""
        raw = await self._cluster.read_fetch_job(job.key) if needs_fetch(job) else None
        return raw if raw is not None and naming.is_owned(raw, job.uid) else None
