"""The HTTP handler of AdmissionReviews: limits the request, reads the objects that the spec names, and answers.

It requires no token: the API server sends none by default, and an answer reveals only whether an object exists. An
unreadable request gets an HTTP error, and `failurePolicy` decides. If an object in the cluster cannot be read, the job
is admitted with a warning, because a slow API server must not block users.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from aiohttp import web
from pydantic import ValidationError

from ppojob_api.v1alpha1.status import OperatorStatus
from ppojob_operator import logs, ownership
from ppojob_operator.admission import review, verdict
from ppojob_operator.admission.ports import ReferencePort
from ppojob_operator.admission.review import Request, ReviewError
from ppojob_operator.admission.verdict import Seen, Verdict
from ppojob_operator.api_server import ApiError
from ppojob_operator.plan import Job, Manifest
from ppojob_operator.reading import read_job
from ppojob_operator.reconcile.acceptance import Reference, is_template_missing, template_of

_LOG = logging.getLogger(__name__)
PATH = "/validate"
_MAX_BYTES = 8 * 2**20
"""The API server accepts objects of 3 MiB, and a review has two."""
_BODY_SECONDS = 5.0
_READ_TIMEOUT_SECONDS = 2.0
_MAX_REVIEWS = 16
"""Reviews in progress at the same time; others wait until the API server's timeout."""
_MAX_REFERENCES = 32
"""Objects read for one review, so that one request cannot cause a thousand."""
_FOREIGN = "this webhook validates new and changed PPOJobs only: check the rules of its configuration"


class AdmissionEndpoint:
    """`POST PATH`."""

    def __init__(
        self,
        port: ReferencePort,
        own: OperatorStatus,
        count: Callable[[str], None],
        *,
        read_timeout_seconds: float = _READ_TIMEOUT_SECONDS,
    ) -> None:
        """Validate for one operator.

        Args:
            port: the API server.
            own: the identity of this operator; jobs of other operators are admitted unchecked.
            count: called with each review's outcome: Allowed, Warned, Refused or Malformed.
            read_timeout_seconds: timeout for reading one object.
        """
        self._port = port
        self._own = own
        self._count = count
        self._read_timeout_seconds = read_timeout_seconds
        self._turns = asyncio.Semaphore(_MAX_REVIEWS)

    def application(self) -> web.Application:
        """Return the application, with this one path."""
        application = web.Application(client_max_size=_MAX_BYTES)
        application.router.add_post(PATH, self._handle)
        return application

    async def _handle(self, request: web.Request) -> web.Response:
        # Read the body first: a slow sender must not occupy a slot.
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                parsed = review.read(await request.read())
        except TimeoutError:
            return self._malformed(408, f"the body did not arrive within {_BODY_SECONDS:g} s")
        except web.HTTPRequestEntityTooLarge:
            return self._malformed(413, f"the body has more than {_MAX_BYTES} bytes")
        except ReviewError as error:
            return self._malformed(400, str(error))
        async with self._turns:
            return web.json_response(await self._answer(parsed))

    def _malformed(self, status: int, message: str) -> web.Response:
        self._count("Malformed")
        _LOG.debug("an unreadable admission review: %s", message)
        return web.json_response({"message": message}, status=status)

    async def _answer(self, request: Request) -> object:
        if problem := ownership.annotation_problem(request.new_requested_owner):
            return self._respond(request, Verdict(problem))
        raw = request.job
        if raw is None:
            return self._respond(request, Verdict("", () if request.is_ours else (_FOREIGN,)))
        job, before = _read(raw), request.job_before
        if ownership.is_another_operators(job, self._own):
            return self._respond(request, Verdict(""))
        with logs.about(str(job.key)):
            template, unreadable = await self._read_template(job)
            job = _read(raw, template)
            seen = await self._read_references(job)
            seen = replace(seen, unreadable={**seen.unreadable, **unreadable})
            return self._respond(request, verdict.judge(job, seen, None if before is None else _read(before, template)))

    def _respond(self, request: Request, result: Verdict) -> object:
        self._count("Refused" if result.refusal else "Warned" if result.warnings else "Allowed")
        if result.refusal:
            # The requester gets the message. It may contain values of the spec, which must not be logged.
            _LOG.info("refused %s of %r", request.operation, f"{request.namespace}/{request.name}")
        return review.answer(request.uid, result.refusal, result.warnings)

    async def _read_template(self, job: Job) -> tuple[Manifest | None, dict[Reference, str]]:
        """Return the template of a job that is not accepted, and why it cannot be read."""
        if not is_template_missing(job):
            return None, {}
        reference = template_of(job)
        found = await self._read_reference(reference, job.key.namespace)
        return (None, {reference: found}) if isinstance(found, str) else (found, {})

    async def _read_references(self, job: Job) -> Seen:
        named = verdict.references_to_read(job)[:_MAX_REFERENCES]
        answers = await asyncio.gather(*(self._read_reference(reference, job.key.namespace) for reference in named))
        read = dict(zip(named, answers, strict=True))
        return Seen(
            found={reference: raw for reference, raw in read.items() if not isinstance(raw, str)},
            unreadable={reference: problem for reference, problem in read.items() if isinstance(problem, str)},
        )

    async def _read_reference(self, reference: Reference, namespace: str) -> Manifest | str | None:
        """Return the object, None if it does not exist, or a message why it cannot be read."""
        try:
            async with asyncio.timeout(self._read_timeout_seconds):
                return await self._port.read_reference(reference, namespace)
        except TimeoutError:
            return f"no answer within {self._read_timeout_seconds:g} s"
        except ApiError as error:
            _LOG.warning("%s %s could not be read: %s", reference.kind.value, reference.name, error)
            return "the API server did not answer, or the operator may not read it"


def _read(raw: Manifest, template: Manifest | None = None) -> Job:
    """Return the view of a PPOJob, without the status if only a newer operator can read it."""
    try:
        return read_job(raw, template)
    except ValidationError:
        return read_job({**raw, "status": {}}, template)
