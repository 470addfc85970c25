"""Policy: the objects of an attempt. They are created, repaired and restored; then the trainer is submitted to Ray.

Until then, condition Submitted has what the attempt waits for. Edits of the RayCluster by other clients are reverted,
and it is re-created if it was deleted before its trainer. Every field that the operator sets is compared. Additions are
no difference: defaults of the API server, a queue's changes of pod templates, sidecars. Neither are other notations:
clients write quantities in their own way and omit empty values.

In a queue, Kueue only adds to pod templates, which `manifests.queues` keeps, and writes `spec.suspend`, which the
operator never sets. There, edits are reverted only if the RayCluster was created from the desired spec, because Kueue
evicts changed objects, and neither a newer operator nor an edit of runPolicy justifies an eviction.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_api.v1alpha1.merging import MERGE_KEYS
from ppojob_api.v1alpha1.quantities import parse_quantity
from ppojob_operator.manifests import naming
from ppojob_operator.manifests.config_map import config_map, job_file
from ppojob_operator.manifests.dashboard_secret import dashboard_secret, dashboard_token
from ppojob_operator.manifests.network_policy import network_policy
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.manifests.service_account import service_account
from ppojob_operator.manifests.submission import submission
from ppojob_operator.plan import ALIVE, EventRecord, Job, Manifest, Observed, Plan, Submission
from ppojob_operator.reconcile.layout import spec_in_force
from ppojob_operator.reconcile.pods import PoolsFinding
from ppojob_operator.reconcile.situation import Finding, Situation
from ppojob_operator.reconcile.states import is_finished
from ppojob_operator.times import parse_time

_MAX_STOP_WAIT = timedelta(seconds=60)
"""Longest wait for the end of an earlier attempt. Ray sends SIGKILL three seconds after a stop request."""
_FIRST_GENERATION = 1
_MAX_NAMED = 5
_KEYS = {**MERGE_KEYS, "workerGroupSpecs": "groupName"}
_AMOUNTS = {"requests", "limits", "sizeLimit", "divisor"}
"""Fields that are or contain quantities."""
_SECRETIVE = {"env", "args", "command", "annotations"}
"""Fields that may contain passwords: an Event names the field and not its value."""
_NOT_BY_DEFAULT = {
    *("automountServiceAccountToken", "enableServiceLinks", "allowPrivilegeEscalation", "hostUsers"),
    *("runAsUser", "runAsGroup", "fsGroup", "terminationGracePeriodSeconds", "tolerationSeconds"),
    *("defaultMode", "mode", "emptyDir", "labelSelector", "namespaceSelector"),
}
"""Fields whose absence differs from false, 0 or {}."""


@dataclass(frozen=True)
class Step:
    """What to do next for the attempt, and condition Submitted."""

    finding: Finding
    apply: tuple[Manifest, ...] = ()
    submission: Submission | None = None
    stop_submissions: tuple[str, ...] = ()
    """Earlier attempts that Ray still runs: they have the placement groups that the next one needs."""


def next_step(situation: Situation, pools: PoolsFinding) -> Step:
    """Return the next step of the attempt: create objects, submit the trainer, or wait."""
    if situation.submitted_at is not None:
        return Step(_submitted(situation), apply=_renewed_ca(situation))
    return replace(_before_submission(situation, pools), stop_submissions=_running_before(situation))


def _before_submission(situation: Situation, pools: PoolsFinding) -> Step:
    if situation.now < situation.due:
        failure, stop = situation.status.last_failure, situation.status.stop
        words = f"attempt {failure.attempt} failed ({failure.reason})" if failure else "the last attempt failed"
        if stop is not None and stop.reason == Reason.PODS_RELEASED and stop.attempt == situation.attempt - 1:
            words = f"attempt {stop.attempt} has released its pods, because others did not start"
        message = f"{words}; attempt {situation.attempt} starts at {situation.due:%H:%M:%S} UTC"
        return Step(Finding("False", Reason.RESTARTING, message))
    text = job_file(situation.job, situation.spec, situation.observed.surroundings)
    if situation.cluster is None:
        created = (*_pod_dependencies(situation), *_objects(situation, text))
        return Step(_waiting("the pools are not ready"), apply=created)
    changed = _objects(situation, text)[:1] if _is_config_old(situation, text) else ()
    repair = _pod_dependencies(situation) if situation.cluster.problem or _lacks_secret(situation) else ()
    if not pools.is_ready:
        return Step(_waiting("the pools are not ready"), apply=(*repair, *changed))
    if obstacle := _obstacle(situation):
        return Step(_waiting(obstacle), apply=changed)
    sent = submission(
        situation.job,
        attempt=situation.attempt,
        cluster=situation.cluster_name,
        job_text=text,
        pods={pool.name: situation.pod_names(pool.name) for pool in situation.spec.pools},
    )
    return Step(_submitted(situation), apply=changed, submission=sent)


def _lacks_secret(situation: Situation) -> bool:
    """Return whether the kubelet does not find the Secret of the RayCluster, which somebody has deleted."""
    secret = naming.dashboard_secret_name(situation.cluster_name)
    return any(pod.trouble is not None and secret in pod.trouble.message for pod in situation.pods)


def _obstacle(situation: Situation) -> str:
    """Return why the trainer cannot be submitted although the pods are ready; empty: it can."""
    problem = situation.observed.ray.problem if situation.observed.ray else "it was not contacted yet"
    if problem:
        return f"Ray's dashboard does not accept the trainer: {problem}"
    if situation.observed.last_error:
        return f"the trainer cannot be started: {situation.observed.last_error}"
    running = _running_before(situation)
    is_patient = min(situation.now - situation.due, situation.age_of(Condition.POOLS_READY, "True")) < _MAX_STOP_WAIT
    return f"Ray has not stopped {', '.join(running)} yet" if running and is_patient else ""


def _running_before(situation: Situation) -> tuple[str, ...]:
    """Return the submissions of earlier attempts that Ray still runs, because they lost pods or hang."""
    earlier = {naming.submission_id(situation.job.uid, attempt) for attempt in range(situation.attempt)}
    jobs = situation.observed.ray.jobs if situation.observed.ray else ()
    return tuple(job.submission_id for job in jobs if job.submission_id in earlier and job.state in ALIVE)


def _submitted(situation: Situation) -> Finding:
    words = f"attempt {situation.attempt} of the trainer was submitted to Ray in {situation.cluster_name}"
    return Finding("True", Reason.TRAINER_SUBMITTED, words)


def _waiting(words: str) -> Finding:
    return Finding("False", Reason.NOT_SUBMITTED, words)


def _pod_dependencies(situation: Situation) -> tuple[Manifest, ...]:
    """Return the objects that the pods need before KubeRay creates them."""
    job, name = situation.job, situation.cluster_name
    surroundings = situation.observed.surroundings
    token = dashboard_token(surroundings.dashboard_key, job.uid, name)
    account = () if situation.spec.service_account_name else (service_account(job.key, job.uid),)
    return (*_network_policies(situation), *account, dashboard_secret(job.key, job.uid, name, token))


def unused_secrets(job: Job, plan: Plan) -> tuple[str, ...]:
    """Return the Secrets of the RayClusters that a plan deletes, and of the one that it removes from the status.

    The latter may be deleted already, by another client. They are deleted before the RayClusters, so that a reconcile
    after an interrupted one still finds those, and repeats both.
    """
    clusters, known = dict.fromkeys(plan.delete_clusters), job.status.ray_cluster
    if known is not None and plan.status is not None and plan.status.get("rayCluster", {}).get("name") != known.name:
        clusters[known.name] = None
    return tuple(naming.dashboard_secret_name(name) for name in clusters)


def fetch_dependencies(situation: Situation) -> tuple[Manifest, ...]:
    """Return the objects that the pod needs which fetches models and data."""
    job, surroundings = situation.job, situation.observed.surroundings
    account = () if situation.spec.service_account_name else (service_account(job.key, job.uid),)
    text = job_file(job, situation.spec, surroundings)
    config = config_map(job.key, job.uid, text, surroundings.ca_bundle)
    return (*_network_policies(situation), *account, config)


def _network_policies(situation: Situation) -> tuple[Manifest, ...]:
    network, job = situation.observed.surroundings.network, situation.job
    policy = None if network is None else network_policy(situation.spec, job.key, job.uid, network)
    return () if policy is None else (policy,)


def _objects(situation: Situation, text: str) -> tuple[Manifest, Manifest]:
    """Return the ConfigMap and the RayCluster, in the order of their creation."""
    job, ca_bundle = situation.job, situation.observed.surroundings.ca_bundle
    return (
        config_map(job.key, job.uid, text, ca_bundle),
        ray_cluster(situation.spec, job.key, job.uid, situation.cluster_name, situation.avoided_nodes),
    )


def _is_config_old(situation: Situation, text: str) -> bool:
    desired = {constants.JOB_FILE: text, constants.CA_FILE: situation.observed.surroundings.ca_bundle}
    return dict(situation.observed.config or {}) != desired


def _renewed_ca(situation: Situation) -> tuple[Manifest, ...]:
    """Return the ConfigMap if the certificate authority has changed during a running attempt.

    job.json stays the same, because the trainer may still wait for the file with the hash of its submission.
    """
    job, config, ca_bundle = situation.job, situation.observed.config, situation.observed.surroundings.ca_bundle
    if config is None or constants.JOB_FILE not in config or config.get(constants.CA_FILE) == ca_bundle:
        return ()
    return (config_map(job.key, job.uid, config[constants.JOB_FILE], ca_bundle),)


def dashboard_address(situation: Situation) -> str | None:
    """Return the address of Ray's dashboard inside the cluster; None: it does not exist yet."""
    cluster = situation.cluster
    if cluster is None or not cluster.head_service:
        return None
    return naming.dashboard_url(cluster.head_service, situation.job.key.namespace)


@dataclass(frozen=True)
class DashboardTarget:
    """The dashboard of a job's current attempt."""

    cluster: str
    """Name of the RayCluster."""
    service_url: str
    """Its address by the head's Service."""
    pod_url: str
    """Its address by the head pod's IP address."""


def dashboard_target(job: Job, observed: Observed) -> DashboardTarget | None:
    """Return the dashboard of the current attempt; None: the head is not ready, or the job has finished."""
    spec = spec_in_force(job)
    if spec is None or job.is_deleting or is_finished(job.status):
        return None
    situation = Situation(job, spec, observed, parse_time(None))
    cluster, head = situation.cluster, situation.head
    if cluster is None or head is None or not head.is_ready or not cluster.head_service:
        return None
    return DashboardTarget(
        cluster=cluster.name,
        service_url=naming.dashboard_url(cluster.head_service, job.key.namespace),
        pod_url=f"http://{head.address}:{naming.DASHBOARD_PORT}",
    )


@dataclass(frozen=True)
class Restoration:
    """The RayCluster to apply, and the Event about it."""

    manifest: Manifest
    event: EventRecord


def restored(situation: Situation) -> Restoration | None:
    """Return what reverts the edits of the attempt's RayCluster; None: there are none."""
    cluster = situation.cluster
    if cluster is None or cluster.generation <= _FIRST_GENERATION:
        return None
    job, avoided = situation.job, situation.avoided_nodes
    desired = ray_cluster(situation.spec, job.key, job.uid, cluster.name, avoided)
    is_in_queue = situation.spec.run_policy.queue_name is not None
    if is_in_queue and desired["metadata"]["annotations"][constants.ANNOTATION_MADE_OF] != cluster.created_from:
        return None
    found = [*edits(desired["spec"], cluster.spec, "spec"), *_added_groups(desired["spec"], cluster.spec)]
    if not found:
        return None
    message = f"RayCluster {cluster.name} was edited by another client; the edits were reverted: "
    message += "; ".join(found[:_MAX_NAMED]) + (" ..." if len(found) > _MAX_NAMED else "")
    return Restoration(desired, EventRecord(Reason.CLUSTER_RESTORED, message, True, Condition.POOLS_READY))


def resized(situation: Situation) -> Restoration | None:
    """Return what gives the elastic pools of a RayCluster the numbers of pods in the spec; None: they have them."""
    cluster = situation.cluster
    groups = (
        {} if cluster is None else {group.get("groupName"): group for group in cluster.spec.get("workerGroupSpecs", [])}
    )
    changed = []
    for pool in situation.spec.pools:
        if pool.elastic is None or pool.name not in groups:
            continue
        asked = {"minReplicas": pool.needed_nodes, "maxReplicas": pool.nodes, "replicas": pool.nodes}
        found = {name: groups[pool.name].get(name) for name in asked}
        if asked != found:
            changed.append(f"pool {pool.name} requests {pool.nodes} pods, at least {pool.needed_nodes}")
    if cluster is None or not changed:
        return None
    job, words = situation.job, "; ".join(changed)
    desired = ray_cluster(situation.spec, job.key, job.uid, cluster.name, situation.avoided_nodes)
    return Restoration(desired, EventRecord(Reason.POOL_RESIZED, words, False, Condition.POOLS_READY))


def recreated(situation: Situation) -> EventRecord | None:
    """Return the Event if a RayCluster without a trainer was deleted and is re-created by this reconcile.

    With a trainer, its deletion ends the attempt (`attempts.py`).
    """
    known = situation.status.ray_cluster
    is_missing = situation.cluster is None and known is not None and known.uid is not None
    if not is_missing or situation.submitted_at is not None or situation.now < situation.due:
        return None
    message = f"RayCluster {situation.cluster_name} was deleted by another client and is re-created"
    return EventRecord(Reason.CLUSTER_RESTORED, message, is_warning=True, action=Condition.POOLS_READY)


def _added_groups(desired: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield worker groups that the spec does not have, because they use GPUs. Applying the spec removes them."""
    names = {group["groupName"] for group in desired["workerGroupSpecs"]}
    for group in found.get("workerGroupSpecs", []):
        if group["groupName"] not in names:
            yield f"spec.workerGroupSpecs[{group['groupName']}] was added"


def edits(desired: Mapping[str, Any], found: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a phrase for each field of `desired` that differs in `found`; `path` is the path of both.

    The order of scalars in a list matters. Objects in a list are matched by their key or, without one, at any position.
    """
    for name, value in desired.items():
        yield from _field(name, value, found.get(name), f"{path}.{name}", frozenset())


def _field(name: str, desired: Any, found: Any, path: str, within: frozenset[str]) -> Iterator[str]:
    """Yield the edits of one field; `within` has the parent fields that decide how it is compared."""
    within |= {name} & (_AMOUNTS | _SECRETIVE)
    if found is None:
        if desired or name in _NOT_BY_DEFAULT:
            yield f"{path} was removed"
    elif isinstance(desired, Mapping) and isinstance(found, Mapping):
        for each, value in desired.items():
            yield from _field(each, value, found.get(each), f"{path}.{each}", within)
    elif _has_objects(desired) and isinstance(found, list):
        yield from _items(desired, found, path, _KEYS.get(name), within)
    elif not _is_same(desired, found, is_amount=bool(within & _AMOUNTS)):
        shows_values = not within & _SECRETIVE and not isinstance(desired, Mapping) and not _has_objects(desired)
        yield f"{path} was {found} instead of {desired}" if shows_values else f"{path} was changed"


def _items(
    desired: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
    path: str,
    key: str | None,
    within: frozenset[str],
) -> Iterator[str]:
    for index, item in enumerate(desired):
        here = f"{path}[{index if key is None else item.get(key)}]"
        same_name = [each for each in found if key is None or each.get(key) == item.get(key)]
        # Several may have the name: ports also differ by protocol.
        differences = [list(_field("", item, each, here, within)) for each in same_name]
        if not differences:
            yield f"{here} was removed"
        elif all(differences):
            yield from min(differences, key=len)


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _is_same(desired: Any, found: Any, *, is_amount: bool) -> bool:
    return bool(desired == found or (is_amount and _amount(desired) == _amount(found)))


def _amount(value: Any) -> Any:
    """Return a quantity as a number: 500m and 0.5 are equal."""
    try:
        return parse_quantity(str(value))
    except ValueError:
        return value
