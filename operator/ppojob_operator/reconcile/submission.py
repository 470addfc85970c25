"""Policy: what the attempt needs before the trainer can be sent to Ray, and whether it is time to send it."""

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

_LONGEST_END = timedelta(seconds=60)
"""How long the next attempt waits for an earlier one. Ray kills what has not ended three seconds after it was asked."""


@dataclass(frozen=True)
class Step:
    """What to do next for the attempt, and the condition Submitted."""

    finding: Finding
    apply: tuple[Manifest, ...] = ()
    submission: Submission | None = None
    stop_submissions: tuple[str, ...] = ()
    """Earlier attempts that Ray still runs: they hold the placement groups that the next one needs."""


def next_step(situation: Situation, pools: PoolsFinding) -> Step:
    """Return what brings the attempt forward: its objects, the submission, or nothing but patience."""
    if situation.submitted_at is not None:
        return Step(_sent(situation), apply=_renewed_ca(situation))
    return replace(_towards_sending(situation, pools), stop_submissions=_running_before(situation))


def _towards_sending(situation: Situation, pools: PoolsFinding) -> Step:
    if situation.now < situation.due:
        failure = situation.status.last_failure
        words = f"attempt {failure.attempt} failed ({failure.reason})" if failure else "the last attempt failed"
        message = f"{words}; attempt {situation.attempt} begins at {situation.due:%H:%M:%S} UTC"
        return Step(Finding("False", Reason.RESTARTING, message))
    text = job_file(situation.job, situation.spec, situation.observed.surroundings)
    if situation.cluster is None:
        return Step(_waiting("the pools are not ready"), apply=(*_companions(situation), *_objects(situation, text)))
    changed = _objects(situation, text)[:1] if _is_config_old(situation, text) else ()
    repair = _companions(situation) if situation.cluster.problem else ()
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
    return Step(_sent(situation), apply=changed, submission=sent)


def _obstacle(situation: Situation) -> str:
    """Return why Ray cannot be given the trainer, though the pods are ready; empty: it can."""
    problem = situation.observed.ray.problem if situation.observed.ray else "it was not asked yet"
    if problem:
        return f"Ray's dashboard does not take the trainer: {problem}"
    if situation.observed.last_error:
        return f"the trainer cannot be started: {situation.observed.last_error}"
    running = _running_before(situation)
    is_patient = min(situation.now - situation.due, situation.age_of(Condition.POOLS_READY, "True")) < _LONGEST_END
    return f"Ray has not ended {', '.join(running)} yet" if running and is_patient else ""


def _running_before(situation: Situation) -> tuple[str, ...]:
    """Return the submissions of earlier attempts that Ray still runs: their pods were lost, or they hang."""
    earlier = {naming.submission_id(situation.job.uid, attempt) for attempt in range(situation.attempt)}
    jobs = situation.observed.ray.jobs if situation.observed.ray else ()
    return tuple(job.submission_id for job in jobs if job.submission_id in earlier and job.state in ALIVE)


def _sent(situation: Situation) -> Finding:
    words = f"attempt {situation.attempt} of the trainer was sent to Ray in {situation.cluster_name}"
    return Finding("True", Reason.TRAINER_SUBMITTED, words)


def _waiting(words: str) -> Finding:
    return Finding("False", Reason.NOT_SUBMITTED, words)


def _companions(situation: Situation) -> tuple[Manifest, ...]:
    """Return what the pods need before KubeRay can make them."""
    job, name = situation.job, situation.cluster_name
    surroundings = situation.observed.surroundings
    token = dashboard_token(surroundings.dashboard_key, job.uid, name)
    account = () if situation.spec.service_account_name else (service_account(job.key, job.uid),)
    return (*_network_policies(situation), *account, dashboard_secret(job.key, job.uid, name, token))


def fetch_companions(situation: Situation) -> tuple[Manifest, ...]:
    """Return what the pod needs that fetches models and data."""
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
    """Return the ConfigMap and the RayCluster, in the order in which they are to be made."""
    job, ca_bundle = situation.job, situation.observed.surroundings.ca_bundle
    return (
        config_map(job.key, job.uid, text, ca_bundle),
        ray_cluster(situation.spec, job.key, job.uid, situation.cluster_name),
    )


def _is_config_old(situation: Situation, text: str) -> bool:
    wanted = {constants.JOB_FILE: text, constants.CA_FILE: situation.observed.surroundings.ca_bundle}
    return dict(situation.observed.config or {}) != wanted


def _renewed_ca(situation: Situation) -> tuple[Manifest, ...]:
    """Return the ConfigMap if the certificate authority changed under a running trainer.

    job.json stays as it was sent: the trainer may still be waiting for the file with the hash that it was given.
    """
    job, config, ca_bundle = situation.job, situation.observed.config, situation.observed.surroundings.ca_bundle
    if config is None or constants.JOB_FILE not in config or config.get(constants.CA_FILE) == ca_bundle:
        return ()
    return (config_map(job.key, job.uid, config[constants.JOB_FILE], ca_bundle),)


def dashboard_address(situation: Situation) -> str | None:
    """Return the address of Ray's dashboard inside the cluster, once there is one."""
    cluster = situation.cluster
    if cluster is None or not cluster.head_service:
        return None
    return naming.dashboard_url(cluster.head_service, situation.job.key.namespace)
