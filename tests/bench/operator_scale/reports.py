"""The trainers' side of the bench: tokens of the fake heads, and progress reports with them over HTTPS.

The tokens are the API server's own, bound to pod and audience as the kubelet would ask for them.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ppojob_api.v1alpha1.progress import REPORT_PATH, progress_audience
from tests.bench.operator_scale.fleet import Fleet, concurrently, ticks

_ACCOUNT = "/api/v1/namespaces/{}/serviceaccounts/{}/token"
_TOKEN_SECONDS = 3600
_ANSWER_SECONDS = 30.0


@dataclass
class Reporters:
    """The trainers of a fleet."""

    fleet: Fleet
    session: aiohttp.ClientSession
    server: str
    account_of: Any
    """From a job's name to its service account's."""
    tokens: dict[str, str] = field(default_factory=dict)
    answers: Counter[int] = field(default_factory=Counter)
    """How many reports were answered with which HTTP status; 0: not at all."""
    accepted: dict[str, float] = field(default_factory=dict)
    """When a job's first report was accepted, in seconds of the monotonic clock."""
    seconds: list[float] = field(default_factory=list)
    """How long each answer took."""
    sent: Counter[str] = field(default_factory=Counter)
    """How many reports each job has sent: they number them."""

    async def prepare(self) -> None:
        """Ask for a token of each head."""

        async def one(name: str) -> None:
            pod, uid = self.fleet.heads[name]
            bound = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
            audience = progress_audience(self.fleet.namespace, name, self.fleet.uids[name])
            spec = {"audiences": [audience], "expirationSeconds": _TOKEN_SECONDS, "boundObjectRef": bound}
            path = _ACCOUNT.format(self.fleet.namespace, self.account_of(name))
            made = await self.fleet.connection.call("POST", path, {"spec": spec})
            self.tokens[name] = made["status"]["token"]

        await concurrently(one, list(self.fleet.times.running))

    async def send(self, per_second: float, seconds: float) -> float:
        """Send reports of all jobs in turn at a rate; return the rate that was reached."""
        names, began = sorted(self.tokens), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            async for tick in ticks(per_second, seconds):
                name = names[tick % len(names)]
                self.sent[name] += 1
                tasks.create_task(self._report(name, self.sent[name]))
        return int(per_second * seconds) / (time.monotonic() - began)

    async def _report(self, name: str, number: int) -> None:
        body = {
            "uid": self.fleet.uids[name],
            "attempt": 0,
            "number": number,
            "activity": "Training",
            "step": number,
            "totalSteps": 100_000,
            "etaSeconds": 600,
            "reward": 0.25,
            "metrics": {"critic/score/mean": 0.25, "timing_s/step": 1.5, "actor/pg_loss": 0.01},
            "pools": [{"name": "actor", "busyFraction": 0.9}, {"name": "critic", "busyFraction": 0.4}],
        }
        url = self.server + REPORT_PATH.format(namespace=self.fleet.namespace, name=name)
        headers = {"Authorization": f"Bearer {self.tokens[name]}"}
        began = time.monotonic()
        try:
            async with self.session.post(url, json=body, headers=headers) as answer:
                await answer.read()
                status = answer.status
        except (aiohttp.ClientError, TimeoutError):
            status = 0
        self.answers[status] += 1
        self.seconds.append(time.monotonic() - began)
        if status == 200:
            self.accepted.setdefault(name, time.monotonic())


@asynccontextmanager
async def reporting(fleet: Fleet, server: str, ca_bundle: str, account_of: Any) -> AsyncIterator[Reporters]:
    """Connect to the operator's status endpoint and get the tokens."""
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=ca_bundle), limit=64)
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        reporters = Reporters(fleet, session, server, account_of)
        await reporters.prepare()
        yield reporters
