"""Who sends a report: the token is good for this job's audience, the job's own account, and a live pod of its attempt.

`intake.py` calls it. Tokens are kept as hashes only and are never logged. The API server's word on a token is believed
for a short time, so that a thousand jobs do not ask it a hundred times a second; the pod is looked at each time.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.progress import progress_audience
from ppojob_operator.api_server import RawObject
from ppojob_operator.status_server import refusals
from ppojob_operator.status_server.ports import JobIdentity, ProgressPort, TokenIdentity

_MAX_CACHED = 4096
_MAX_REVIEWS = 16
_REFUSED_SECONDS = 10.0
"""How long a refused token is believed to be so: an attacker's flood costs one review in this time."""
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Sender:
    """Who sends a report: a live pod that is labelled with the job."""

    username: str
    pod: RawObject


class TokenReviews:
    """TokenReview with a memory."""

    def __init__(self, port: ProgressPort, *, cache_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._port = port
        self._cache_seconds = cache_seconds
        self._clock = clock
        self._cached: OrderedDict[bytes, tuple[float, TokenIdentity | None]] = OrderedDict()
        self._running = asyncio.Semaphore(_MAX_REVIEWS)

    async def review(self, token: str, audience: str) -> TokenIdentity | None:
        """Return whom the token stands for, or None if it is not good for the audience.

        Raises:
            ApiUnavailable: the API server does not answer.
            ApiRefused: the operator may not review tokens.
        """
        key = hashlib.sha256(f"{audience}\n{token}".encode()).digest()
        known = self._cached.get(key)
        if known and self._clock() < known[0]:
            return known[1]
        async with self._running:
            identity = await self._port.review_token(token, audience)
        # An API server that does not know audiences says yes without naming one.
        if identity is not None and audience not in identity.audiences:
            identity = None
        self._remember(key, identity)
        return identity

    def _remember(self, key: bytes, identity: TokenIdentity | None) -> None:
        lifetime = self._cache_seconds if identity else min(_REFUSED_SECONDS, self._cache_seconds)
        self._cached[key] = (self._clock() + lifetime, identity)
        self._cached.move_to_end(key)
        while len(self._cached) > _MAX_CACHED:
            self._cached.popitem(last=False)


class Authenticator:
    """Decides whether the sender of a request may report for a job."""

    def __init__(
        self,
        port: ProgressPort,
        reviews: TokenReviews,
        account_of: Callable[[str], str],
        fetch_job_of: Callable[[str], str],
    ) -> None:
        """`account_of` and `fetch_job_of` give a job's ServiceAccount and the Job that fetches for it, by its name."""
        self._port = port
        self._reviews = reviews
        self._account_of = account_of
        self._fetch_job_of = fetch_job_of

    async def check(self, authorization: str | None, key: JobIdentity) -> Sender:
        """Return who the sender is, if it is a live pod of the job; `check_sender` or `check_fetcher` comes next.

        Args:
            authorization: the request's header of that name.
            key: the job for which the sender claims to speak.

        Raises:
            Refusal: with what is wrong and what to do.
            ApiUnavailable: the API server does not answer.
            ApiRefused: the operator lacks a right.
        """
        audience = progress_audience(*key)
        identity = await self._reviews.review(_bearer_token(authorization), audience)
        if identity is None:
            raise refusals.unauthenticated(
                f"the token is not valid, or not for the audience {audience}: "
                "read the projected token's file anew for each report"
            )
        if not identity.pod_name or not identity.pod_uid:
            raise refusals.forbidden("the token is not bound to a pod: use the token that is projected into the pod")
        pod = await self._port.read_pod(key.namespace, identity.pod_name)
        return Sender(identity.username, _live_pod(pod, identity, key))

    def check_sender(self, sender: Sender, key: JobIdentity, job: RawObject) -> None:
        """Return if the sender has the ServiceAccount of the job's pods, which the job may name, and is one of them.

        Raises:
            Refusal: it has another, or is a pod of another RayCluster than the current attempt's.
        """
        self._check_account(sender, key, job)
        _check_cluster(sender.pod["metadata"], key, job)

    def check_fetcher(self, sender: Sender, key: JobIdentity, job: RawObject) -> str:
        """Return the sender's pod if it is one of the Job that fetches the job's models and data.

        Raises:
            Refusal: it has another ServiceAccount, or is another pod.
        """
        self._check_account(sender, key, job)
        pod, wanted = sender.pod["metadata"], self._fetch_job_of(key.name)
        owners = [owner["name"] for owner in pod.get("ownerReferences", []) if owner["kind"] == "Job"]
        if owners != [wanted]:
            owner = ", ".join(owners) or "none"
            raise refusals.forbidden(
                f"pod {pod['name']} is of Job {owner}: reports on models and data of {key} come from {wanted}"
            )
        return str(pod["name"])

    def _check_account(self, sender: Sender, key: JobIdentity, job: RawObject) -> None:
        named = job.get("spec", {}).get("serviceAccountName")
        account = f"system:serviceaccount:{key.namespace}:{named or self._account_of(key.name)}"
        if sender.username != account:
            raise refusals.forbidden(f"the token belongs to {sender.username}: reports of {key} come from {account}")


def _bearer_token(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise refusals.unauthenticated("there is no token: send `Authorization: Bearer` with the projected token")
    return token.strip()


def _live_pod(pod: RawObject | None, identity: TokenIdentity, key: JobIdentity) -> RawObject:
    """Return the pod of a token; refuse one whose pod is gone, has ended, or is not the job's.

    A pod that is being deleted still counts: in its grace period it puts its last checkpoint down and says so.
    """
    if pod is None or pod["metadata"]["uid"] != identity.pod_uid or pod.get("status", {}).get("phase") in _ENDED:
        raise refusals.forbidden(f"pod {identity.pod_name} of the token is gone: stop the trainer")
    owner = pod["metadata"].get("labels", {}).get(constants.LABEL_JOB)
    if owner != key.name:
        raise refusals.forbidden(
            f"pod {identity.pod_name} is labelled {constants.LABEL_JOB}={owner}: only pods of {key.name} report for it"
        )
    return pod


def _check_cluster(pod: RawObject, key: JobIdentity, job: RawObject) -> None:
    """Refuse a pod that is not of the current attempt's RayCluster, by its label and by who made it."""
    cluster = job.get("status", {}).get("rayCluster", {}).get("name")
    labelled = pod.get("labels", {}).get(constants.LABEL_RAY_CLUSTER)
    owners = [owner["name"] for owner in pod.get("ownerReferences", []) if owner["kind"] == "RayCluster"]
    if cluster is None or labelled != cluster or owners != [cluster]:
        owner = ", ".join(owners) or "none"
        raise refusals.forbidden(
            f"pod {pod['name']} is of RayCluster {owner} (labelled {labelled}): reports of {key} come from {cluster}"
        )
