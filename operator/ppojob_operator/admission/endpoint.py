"""The HTTPS application that answers the API server's AdmissionReviews: limits, a look at the cluster, the answer.

It asks for no token: the API server shows none by default, and the answer says no more than whether an object of some
name is there. What it cannot read it answers with an error, and `failurePolicy` decides; what it cannot look at in the
cluster it leaves to the operator, because an API server that is slow must not stop people from working.
"""

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web
from pydantic import ValidationError

from ppojob_api.v1alpha1.status import OperatorStatus
from ppojob_operator import logs
from ppojob_operator.admission import review, verdict
from ppojob_operator.admission.ports import ReferencePort
from ppojob_operator.admission.review import Request, ReviewError
from ppojob_operator.admission.verdict import Seen, Verdict
from ppojob_operator.api_server import ApiError
from ppojob_operator.plan import Job, Manifest
from ppojob_operator.reconcile import ownership, read_job
from ppojob_operator.reconcile.references import Reference

_LOG = logging.getLogger(__name__)
PATH = "/validate"
_MAX_BYTES = 8 * 2**20
"""The API server takes objects of 3 MiB, and a review has two of them."""
_BODY_SECONDS = 5.0
_READ_TIMEOUT_SECONDS = 2.0
_MAX_REVIEWS = 16
"""Reviews in work at the same time; others wait, for as long as the API server does."""
_MAX_REFERENCES = 32
"""Objects that are looked for in one review: nobody may make a thousand questions of one."""
_FOREIGN = "this webhook judges new and changed PPOJobs only: look at the rules of its configuration"


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
        """Answer for an operator.

        Args:
            port: the API server.
            own: which operator this is; the jobs of another one are that one's to judge.
            count: called with each review's outcome: Allowed, Warned, Refused or Malformed.
            read_timeout_seconds: longest time for one look at an object.
        """
        self._port = port
        self._own = own
        self._count = count
        self._read_timeout_seconds = read_timeout_seconds
        self._turns = asyncio.Semaphore(_MAX_REVIEWS)

    def application(self) -> web.Application:
        """Return the application; it knows this one path."""
        application = web.Application(client_max_size=_MAX_BYTES)
        application.router.add_post(PATH, self._handle)
        return application

    async def _handle(self, request: web.Request) -> web.Response:
        # Read before a turn is taken: who sends slowly keeps nobody else from theirs.
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                asked = review.read(await request.read())
        except TimeoutError:
            return self._malformed(408, f"the body did not come within {_BODY_SECONDS:g} s")
        except web.HTTPRequestEntityTooLarge:
            return self._malformed(413, f"the body has more than {_MAX_BYTES} bytes")
        except ReviewError as error:
            return self._malformed(400, str(error))
        async with self._turns:
            return web.json_response(await self._answer(asked))

    def _malformed(self, status: int, message: str) -> web.Response:
        self._count("Malformed")
        _LOG.debug("an admission review that cannot be read: %s", message)
        return web.json_response({"message": message}, status=status)

    async def _answer(self, asked: Request) -> object:
        if problem := ownership.annotation_problem(asked.new_requested_owner):
            return self._said(asked, Verdict(problem))
        raw = asked.job
        if raw is None:
            return self._said(asked, Verdict("", () if asked.is_ours else (_FOREIGN,)))
        job, before = _read(raw), asked.job_before
        if ownership.is_another_operators(job, self._own):
            return self._said(asked, Verdict(""))
        with logs.about(str(job.key)):
            seen = await self._read_references(job)
            return self._said(asked, verdict.judge(job, seen, None if before is None else _read(before)))

    def _said(self, asked: Request, said: Verdict) -> object:
        self._count("Refused" if said.refusal else "Warned" if said.warnings else "Allowed")
        if said.refusal:
            # Who asked has the words; values of the spec, and whatever a stranger sends, do not belong into a log.
            _LOG.info("refused %s of %r", asked.operation, f"{asked.namespace}/{asked.name}")
        return review.answer(asked.uid, said.refusal, said.warnings)

    async def _read_references(self, job: Job) -> Seen:
        named = verdict.references_to_read(job)[:_MAX_REFERENCES]
        answers = await asyncio.gather(*(self._read_reference(reference, job.key.namespace) for reference in named))
        looked = dict(zip(named, answers, strict=True))
        return Seen(
            found={reference: raw for reference, raw in looked.items() if not isinstance(raw, str)},
            unseen={reference: problem for reference, problem in looked.items() if isinstance(problem, str)},
        )

    async def _read_reference(self, reference: Reference, namespace: str) -> Manifest | str | None:
        """Return the object, None if there is none, or in words why that cannot be known."""
        try:
            async with asyncio.timeout(self._read_timeout_seconds):
                return await self._port.read_reference(reference, namespace)
        except TimeoutError:
            return f"no answer within {self._read_timeout_seconds:g} s"
        except ApiError as error:
            _LOG.warning("%s %s could not be looked for: %s", reference.kind.value, reference.name, error)
            return "the API server did not answer, or the operator may not ask"


def _read(raw: Manifest) -> Job:
    """Return the view of a PPOJob. Of a status that only a newer operator understands, nothing is seen."""
    try:
        return read_job(raw)
    except ValidationError:
        return read_job({**raw, "status": {}})
