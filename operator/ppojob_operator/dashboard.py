"""The client of Ray's dashboard: submit the trainer, list jobs, read the end of a log, stop a job.

No other module talks to Ray. It uses HTTP with the token of the RayCluster; every call has a timeout. The paths are
those of Ray's job submission REST API, and of its state API for the end of a log, which the first cannot read.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ppojob_operator.plan import Ray, RayJob, RayState, Submission

_MAX_WORDS = 500
_MAX_BYTES = 4 * 1024 * 1024
"""Longest response, except for a log. Ray's list has up to 25 kB for each attempt in the RayCluster. A forged list
needs many times its length while it is parsed; one list is parsed at a time."""
_MAX_JOBS = 1000
_MAX_LOG_BYTES = 16 * 1024 * 1024
_LOG_END_BYTES = 1024 * 1024
"""Of a log's last lines, only the end is kept: some programs write very long lines."""
_LOG_LINES = 1000
"""More than a status shows, because other processes may print lines after the one that names the failure."""


class DashboardError(Exception):
    """The request failed; the message includes the dashboard's own."""


class _NotThereError(DashboardError):
    """The dashboard does not know the job."""


class _ListedJob(BaseModel):
    """What the operator reads of a job in Ray's list. Ray's own jobs have no submission_id."""

    model_config = ConfigDict(extra="ignore")

    submission_id: str | None = None
    status: RayState
    message: str | None = None
    error_type: str | None = None
    driver_exit_code: Annotated[int, Field(ge=-255, le=255)] | None = None
    driver_node_id: str | None = None
    metadata: dict[str, str] | None = None


_LISTED = TypeAdapter(Annotated[list[_ListedJob], Field(max_length=_MAX_JOBS)])


@dataclass(frozen=True)
class Address:
    """URL and token of a dashboard."""

    url: str
    token: str

    def __repr__(self) -> str:
        """Return the address without the token."""
        return f"Address({self.url})"


class Dashboard:
    """The dashboards of all jobs, with one connection pool."""

    def __init__(
        self, session: aiohttp.ClientSession, *, timeout: float, guard: Callable[[], None] = lambda: None
    ) -> None:
        """Use a session.

        Args:
            session: the connection pool.
            timeout: of one call, in seconds.
            guard: called before a job is submitted or stopped; if it raises, nothing is sent.
        """
        self._session = session
        self._timeout = timeout
        self._guard = guard

    async def list_jobs(self, address: Address) -> Ray:
        """Return the jobs of a RayCluster, or why the request failed."""
        try:
            data = await self._request("GET", address, "/api/jobs/")
            return Ray(jobs=_read_jobs(data, f"GET {address.url}/api/jobs/"))
        except DashboardError as error:
            return Ray(problem=str(error))

    async def submit(self, address: Address, submission: Submission) -> None:
        """Submit the job. If Ray has it already, an interrupted reconcile submitted it, which is no error.

        Raises:
            DashboardError: the job could not be submitted.
            Exception: what the guard raises.
        """
        self._guard()
        body = {
            "submission_id": submission.submission_id,
            "entrypoint": submission.entrypoint,
            # A driver without resource requests runs on the head.
            "entrypoint_num_cpus": 0,
            "runtime_env": {"env_vars": dict(submission.environment)},
            "metadata": dict(submission.metadata),
        }
        try:
            await self._request("POST", address, "/api/jobs/", body=body)
        except DashboardError:
            ray = await self.list_jobs(address)
            if not any(job.submission_id == submission.submission_id for job in ray.jobs):
                raise

    async def stop(self, address: Address, submission_id: str) -> None:
        """Stop a job: Ray sends SIGTERM, and SIGKILL three seconds later. No error if it has ended or does not exist.

        Raises:
            DashboardError: the request failed.
            Exception: what the guard raises.
        """
        self._guard()
        with contextlib.suppress(_NotThereError):
            # The response comes before the job has ended and says whether it was running.
            await self._request("POST", address, f"/api/jobs/{submission_id}/stop")

    async def log_tail(self, address: Address, job: RayJob) -> str:
        """Return the last lines of the driver's log, or the message of the job if the log cannot be read."""
        query = {
            "submission_id": job.submission_id,
            "node_id": job.node_id,
            "lines": str(_LOG_LINES),
            "filter_ansi_code": "true",
        }
        try:
            text = await self._request(
                "GET", address, "/api/v0/logs/file", query=query, limit=_MAX_LOG_BYTES, kept=_LOG_END_BYTES
            )
        except DashboardError as error:
            return f"(the log could not be read: {error})\n{job.message}"
        return text.decode(errors="replace")

    async def _request(
        self,
        method: str,
        address: Address,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        limit: int = _MAX_BYTES,
        kept: int = _MAX_BYTES,
    ) -> bytes:
        """Return the last `kept` bytes of a response with at most `limit` bytes."""
        where = f"{method} {address.url}{path}"
        headers = {"Authorization": f"Bearer {address.token}"}
        try:
            async with (
                asyncio.timeout(self._timeout),
                # The pod belongs to a tenant: follow no redirect, and limit the size of the response.
                self._session.request(
                    method, address.url + path, headers=headers, json=body, params=query, allow_redirects=False
                ) as answer,
            ):
                data = await _read(answer.content, where, limit, kept)
        except TimeoutError as error:
            raise DashboardError(f"{where}: no answer within {self._timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise DashboardError(f"{where}: {type(error).__name__} {error}") from error
        if answer.status >= 300:
            words = data.decode(errors="replace").strip().splitlines()
            kind = _NotThereError if answer.status == HTTPStatus.NOT_FOUND else DashboardError
            raise kind(f"{where}: {answer.status} {(words[-1] if words else '')[:_MAX_WORDS]}")
        return data


async def _read(content: aiohttp.StreamReader, where: str, limit: int, kept: int) -> bytes:
    data, num_bytes = bytearray(), 0
    async for chunk in content.iter_any():
        data += chunk
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise DashboardError(f"{where}: the answer has more than {limit} bytes")
        del data[:-kept]
    return bytes(data)


def _read_jobs(data: bytes, where: str) -> tuple[RayJob, ...]:
    try:
        listed = _LISTED.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        at = "".join(f"[{key!r}]" for key in first["loc"]) or "all of it"
        raise DashboardError(
            f"{where}: the answer is not a list of jobs ({at}: {first['msg']}): {data[:_MAX_WORDS]!r}"
        ) from error
    return tuple(_ray_job(job, job.submission_id) for job in listed if job.submission_id)


def _ray_job(job: _ListedJob, submission_id: str) -> RayJob:
    return RayJob(
        submission_id=submission_id,
        state=job.status,
        message=job.message or "",
        error_type=job.error_type or "",
        exit_code=job.driver_exit_code,
        metadata=job.metadata or {},
        node_id=job.driver_node_id or "",
    )
