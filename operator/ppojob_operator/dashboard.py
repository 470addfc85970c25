"""Ray's dashboard: submit the trainer, ask how it is, read the end of its log, end it.

The only module that talks to Ray, over HTTP and with the token of that RayCluster. Every call has a limit. Source of
the addresses: Ray's job submission REST API, and the log endpoint of its state API (which alone can read a log's end).
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from ppojob_operator.plan import Ray, RayJob, RayState, Submission

_MAX_WORDS = 500
_MAX_BYTES = 16 * 1024 * 1024
"""More than Ray's list of jobs, or the end of a log, ever takes."""
_LOG_LINES = 1000
"""More than a status shows: the line that names the failure may be overtaken by what other processes still print."""


class DashboardError(Exception):
    """The dashboard did not answer, or refused; the message has its words."""


class _NotThereError(DashboardError):
    """The dashboard does not know what it was asked about."""


@dataclass(frozen=True)
class Address:
    """Where a dashboard is, and what opens it."""

    url: str
    token: str

    def __repr__(self) -> str:
        """Return the address without the token."""
        return f"Address({self.url})"


class Dashboard:
    """The dashboards of all jobs; they share one pool of connections."""

    def __init__(
        self, session: aiohttp.ClientSession, *, timeout: float, guard: Callable[[], None] = lambda: None
    ) -> None:
        """Speak through a session.

        Args:
            session: the connections.
            timeout: of one call, in seconds.
            guard: called before a job is submitted or ended; what it raises is raised, and nothing is sent.
        """
        self._session = session
        self._timeout = timeout
        self._guard = guard

    async def list_jobs(self, address: Address) -> Ray:
        """Return what Ray knows of its jobs, or why it does not answer."""
        try:
            listed = await self._json("GET", address, "/api/jobs/")
            if not isinstance(listed, list):
                raise DashboardError(f"GET {address.url}/api/jobs/: no list but {str(listed)[:_MAX_WORDS]!r}")
            return Ray(jobs=tuple(_read_job(raw) for raw in listed if raw.get("submission_id")))
        except DashboardError as error:
            return Ray(problem=str(error))

    async def submit(self, address: Address, submission: Submission) -> None:
        """Start the job. That Ray has it already is no error: the look that sent it was cut short.

        Raises:
            DashboardError: it could not be started.
            Exception: whatever the guard raises.
        """
        self._guard()
        body = {
            "submission_id": submission.submission_id,
            "entrypoint": submission.entrypoint,
            # Without resources of its own the driver runs on the head.
            "entrypoint_num_cpus": 0,
            "runtime_env": {"env_vars": dict(submission.environment)},
            "metadata": dict(submission.metadata),
        }
        try:
            await self._json("POST", address, "/api/jobs/", body=body)
        except DashboardError:
            ray = await self.list_jobs(address)
            if not any(job.submission_id == submission.submission_id for job in ray.jobs):
                raise

    async def stop(self, address: Address, submission_id: str) -> None:
        """Have Ray end a job: it gets SIGTERM, and SIGKILL seconds later. One that has ended, or is gone, is no error.

        Raises:
            DashboardError: Ray could not be asked.
            Exception: whatever the guard raises.
        """
        self._guard()
        with contextlib.suppress(_NotThereError):
            # The answer says whether it ran, and comes before it has ended.
            await self._json("POST", address, f"/api/jobs/{submission_id}/stop")

    async def log_tail(self, address: Address, job: RayJob) -> str:
        """Return the last lines of the driver's log; where they cannot be read, what Ray has in the job's message."""
        query = {
            "submission_id": job.submission_id,
            "node_id": job.node_id,
            "lines": str(_LOG_LINES),
            "filter_ansi_code": "true",
        }
        try:
            text = await self._text("GET", address, "/api/v0/logs/file", query=query)
        except DashboardError as error:
            return f"(the log could not be read: {error})\n{job.message}"
        return text.decode(errors="replace")

    async def _json(self, method: str, address: Address, path: str, *, body: object = None) -> Any:
        data = await self._text(method, address, path, body=body)
        try:
            return json.loads(data)
        except ValueError as error:
            raise DashboardError(f"{method} {address.url}{path}: no JSON but {data[:_MAX_WORDS]!r}") from error

    async def _text(
        self, method: str, address: Address, path: str, *, body: object = None, query: Mapping[str, str] | None = None
    ) -> bytes:
        where = f"{method} {address.url}{path}"
        headers = {"Authorization": f"Bearer {address.token}"}
        try:
            async with (
                asyncio.timeout(self._timeout),
                # The pod belongs to a tenant: its answer must lead nowhere else, and has an end.
                self._session.request(
                    method, address.url + path, headers=headers, json=body, params=query, allow_redirects=False
                ) as answer,
            ):
                data = await _read(answer.content, where)
        except TimeoutError as error:
            raise DashboardError(f"{where}: no answer within {self._timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise DashboardError(f"{where}: {type(error).__name__} {error}") from error
        if answer.status >= 300:
            words = data.decode(errors="replace").strip().splitlines()
            kind = _NotThereError if answer.status == HTTPStatus.NOT_FOUND else DashboardError
            raise kind(f"{where}: {answer.status} {(words[-1] if words else '')[:_MAX_WORDS]}")
        return data


async def _read(content: aiohttp.StreamReader, where: str) -> bytes:
    data = bytearray()
    async for chunk in content.iter_any():
        data += chunk
        if len(data) > _MAX_BYTES:
            raise DashboardError(f"{where}: the answer has more than {_MAX_BYTES} bytes")
    return bytes(data)


def _read_job(raw: Mapping[str, Any]) -> RayJob:
    return RayJob(
        submission_id=raw["submission_id"],
        state=RayState(raw["status"]),
        message=raw.get("message") or "",
        error_type=raw.get("error_type") or "",
        exit_code=raw.get("driver_exit_code"),
        metadata=raw.get("metadata") or {},
        node_id=raw.get("driver_node_id") or "",
    )
