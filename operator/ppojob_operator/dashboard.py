"""The client of Ray's dashboard: submit the trainer, list jobs, read the end of a log, stop a job.

No other module talks to Ray. It uses HTTP with the token of the RayCluster; every call has a timeout. The paths are
those of Ray's job submission REST API, and of its state API for the end of a log, which the first cannot read.
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
"""Longest response; Ray's list of jobs and the end of a log are smaller."""
_LOG_LINES = 1000
"""More than a status shows, because other processes may print lines after the one that names the failure."""


class DashboardError(Exception):
    """The request failed; the message includes the dashboard's own."""


class _NotThereError(DashboardError):
    """The dashboard does not know the job."""


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
            listed = await self._json("GET", address, "/api/jobs/")
            if not isinstance(listed, list):
                raise DashboardError(
                    f"GET {address.url}/api/jobs/: the answer is not a list: {str(listed)[:_MAX_WORDS]!r}"
                )
            return Ray(jobs=tuple(_read_job(raw) for raw in listed if raw.get("submission_id")))
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
            await self._json("POST", address, "/api/jobs/", body=body)
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
            await self._json("POST", address, f"/api/jobs/{submission_id}/stop")

    async def log_tail(self, address: Address, job: RayJob) -> str:
        """Return the last lines of the driver's log, or the message of the job if the log cannot be read."""
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
            raise DashboardError(
                f"{method} {address.url}{path}: the answer is not JSON: {data[:_MAX_WORDS]!r}"
            ) from error

    async def _text(
        self, method: str, address: Address, path: str, *, body: object = None, query: Mapping[str, str] | None = None
    ) -> bytes:
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
