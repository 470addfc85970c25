"""Policy: what the attempt needs before its trainer can be submitted to Ray. Sets condition Submitted."""

from dataclasses import dataclass, replace
from datetime import timedelta

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.manifests import naming
from ppojob_operator.manifests.config_map import config_map, job_file
from ppojob_operator.manifests.dashboard_secret import dashboard_secret, dashboard_token
from ppojob_operator.manifests.network_policy import network_policy
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.manifests.service_account import service_account
from ppojob_operator.manifests.submission import submission
from ppojob_operator.plan import ALIVE, Manifest, Submission
from ppojob_operator.reconcile.pools import PoolsFinding
from ppojob_operator.reconcile.situation import Finding, Situation

_MAX_STOP_WAIT = timedelta(seconds=60)
"""Longest wait for the end of an earlier attempt. Ray sends SIGKILL three seconds after a stop request."""


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
        failure = situation.status.last_failure
        words = f"attempt {failure.attempt} failed ({failure.reason})" if failure else "the last attempt failed"
        message = f"{words}; attempt {situation.attempt} starts at {situation.due:%H:%M:%S} UTC"
        return Step(Finding("False", Reason.RESTARTING, message))
    text = job_file(situation.job, situation.spec, situation.observed.surroundings)
    if situation.cluster is None:
        created = (*_pod_dependencies(situation), *_objects(situation, text))
        return Step(_waiting("the pools are not ready"), apply=created)
    changed = _objects(situation, text)[:1] if _is_config_old(situation, text) else ()
    repair = _pod_dependencies(situation) if situation.cluster.problem else ()
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
        ray_cluster(situation.spec, job.key, job.uid, situation.cluster_name),
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
