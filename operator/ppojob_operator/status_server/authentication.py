"""Checks who sends a report. The token must be for this job, of its service account, and of a live pod of its attempt.

`intake.py` calls it. Tokens are kept as hashes only and are never logged. The API server's answer on a token is
remembered for a short time, so that a thousand jobs do not ask it a hundred times a second; the pod is read each time.

A bad token costs as little as possible. A token that its claims rule out is never reviewed. Refused tokens are
remembered apart from good ones. A source gets few reviews of tokens that turn out to be bad.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.progress import progress_audience
from ppojob_api.v1alpha1.templates import completed_spec
from ppojob_operator.api_server import RawObject
from ppojob_operator.status_server import refusals
from ppojob_operator.status_server.limits import Rates
from ppojob_operator.status_server.ports import JobIdentity, ProgressPort, TokenIdentity
from ppojob_operator.status_server.token_claims import claimed_job

_MAX_CACHED = 4096
_MAX_REVIEWS = 16
_REFUSED_SECONDS = 10.0
"""How long a refused token is remembered: in this time it costs one review."""
_REFUSED_PER_SECOND = 1.0
_REFUSED_BURST = 32
"""Reviews of bad tokens that one source gets. Reviews of good tokens do not count."""
_ENDED = ("Succeeded", "Failed")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Caller:
    """Who holds a token that the API server accepted, and the job that the token is for."""

    key: JobIdentity
    identity: TokenIdentity


@dataclass(frozen=True)
class Sender:
    """Who sends a report: a live pod that is labelled with the job."""

    username: str
    pod: RawObject


class TokenReviews:
    """TokenReview with a memory."""

    def __init__(self, port: ProgressPort, *, cache_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._port = port
        self._good = _Memory[TokenIdentity](cache_seconds, clock)
        self._refused = _Memory[None](min(_REFUSED_SECONDS, cache_seconds), clock)
        self._rates = Rates(_REFUSED_PER_SECOND, _REFUSED_BURST, clock)
        self._running = asyncio.Semaphore(_MAX_REVIEWS)

    async def review(self, token: str, audience: str, source: str) -> TokenIdentity | None:
        """Return whom the token stands for, or None if it is not good for the audience.

        Args:
            token: the token.
            audience: of the job that the request is about.
            source: IP address of the sender.

        Raises:
            Refusal: the source sent too many bad tokens.
            ApiUnavailable: the API server does not answer.
            ApiRefused: the operator may not review tokens.
        """
        digest = hashlib.sha256(f"{audience}\n{token}".encode()).digest()
        for memory in (self._good, self._refused):
            if digest in memory:
                return memory[digest]
        # Counted before the review: many bad tokens at the same time must not all be reviewed.
        if not self._rates.take(source):
            raise refusals.too_many_requests("this address sent too many invalid tokens")
        identity = await self._ask(token, audience, source)
        if identity is None:
            self._refused[digest] = None
        else:
            self._rates.refund(source)
            self._good[digest] = identity
        return identity

    async def _ask(self, token: str, audience: str, source: str) -> TokenIdentity | None:
        try:
            async with self._running:
                identity = await self._port.review_token(token, audience)
        except BaseException:
            self._rates.refund(source)
            raise
        # An API server that does not know audiences accepts the token without naming one.
        return identity if identity is not None and audience in identity.audiences else None


class _Memory(Generic[Answer]):
    """The newest answers by the digest of their token, each for a time; the oldest is forgotten first."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._answers: OrderedDict[bytes, tuple[float, Answer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._answers and self._clock() < self._answers[digest][0]

    def __getitem__(self, digest: bytes) -> Answer:
        return self._answers[digest][1]

    def __setitem__(self, digest: bytes, answer: Answer) -> None:
        self._answers[digest] = (self._clock() + self._seconds, answer)
        self._answers.move_to_end(digest)
        if len(self._answers) > _MAX_CACHED:
            self._answers.popitem(last=False)


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
        self._deleted = _Memory[bool](_REFUSED_SECONDS, monotonic)

    async def identify(self, authorization: str | None, namespace: str, name: str, source: str) -> Caller:
        """Return who holds the token, by the request's header alone; `check_pod`, and then `check_sender` or
        `check_fetcher` come next.

        Args:
            authorization: the request's header of that name.
            namespace: namespace of the job for which the sender claims to speak.
            name: name of that job.
            source: IP address of the sender.

        Raises:
            Refusal: with what is wrong and what to do.
            ApiUnavailable: the API server does not answer.
            ApiRefused: the operator lacks a right.
        """
        token = _bearer_token(authorization)
        key = claimed_job(token, namespace, name, time.time())
        audience = progress_audience(*key)
        identity = await self._reviews.review(token, audience, source)
        if identity is None and await self._is_deleted(key):
            raise refusals.job_not_found(f"{namespace}/{name}")
        if identity is None:
            raise refusals.unauthenticated(
                f"the token is not valid, or not for the audience {audience}: "
                "read the projected token's file again for each report"
            )
        if not identity.pod_name or not identity.pod_uid:
            raise refusals.forbidden("the token is not bound to a pod: use the token that is projected into the pod")
        if not identity.username.startswith(f"system:serviceaccount:{namespace}:"):
            raise refusals.forbidden(f"the token belongs to {identity.username}, which is not in namespace {namespace}")
        return Caller(key, identity)

    async def _is_deleted(self, key: JobIdentity) -> bool:
        """Return whether the job was deleted. Its ServiceAccount is deleted with it, so tokens of its pods are refused.

        It is read once in a while, because anybody can send a bad token. The answer says nothing to a sender who does
        not know the job's uid.
        """
        audience = hashlib.sha256(progress_audience(*key).encode()).digest()
        if audience not in self._deleted:
            job = await self._port.read_job(key.namespace, key.name)
            self._deleted[audience] = job is None or job["metadata"]["uid"] != key.uid
        return self._deleted[audience]

    async def check_pod(self, caller: Caller) -> Sender:
        """Return the sender if it is a live pod that is labelled with the job.

        Raises:
            Refusal: with what is wrong and what to do.
            ApiUnavailable: the API server does not answer.
            ApiRefused: the operator lacks a right.
        """
        pod = await self._port.read_pod(caller.key.namespace, caller.identity.pod_name or "")
        return Sender(caller.identity.username, _live_pod(pod, caller.identity, caller.key))

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
        named = completed_spec(job).get("serviceAccountName")
        account = f"system:serviceaccount:{key.namespace}:{named or self._account_of(key.name)}"
        if sender.username != account:
            raise refusals.forbidden(f"the token belongs to {sender.username}: reports of {key} come from {account}")


def _bearer_token(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise refusals.unauthenticated("there is no token: send `Authorization: Bearer` with the projected token")
    return token.strip()


def _live_pod(pod: RawObject | None, identity: TokenIdentity, key: JobIdentity) -> RawObject:
    """Return the pod of a token; refuse one whose pod is deleted, has ended, or is not the job's.

    A pod that is being deleted still counts: in its grace period it saves its last checkpoint and reports it.
    """
    if pod is None or pod["metadata"]["uid"] != identity.pod_uid or pod.get("status", {}).get("phase") in _ENDED:
        raise refusals.forbidden(f"pod {identity.pod_name} of the token was deleted or has ended: stop the trainer")
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
