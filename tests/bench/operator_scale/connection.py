"""The API server as the bench needs it: one call, a watch that never ends, and its own counters.

The fleet and the bench ask through it. It uses the administrator's kubeconfig and few objects of Python, because it
shares the machine with what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_CALL_SECONDS = 60.0
_PAUSE_SECONDS = 0.5
_MAX_LINE = 2**24

Heard = Callable[[str, dict[str, Any]], None]
"""Called with the type of an event of a watch (ADDED, MODIFIED, DELETED) and its object."""


class CallError(RuntimeError):
    """The API server did not do what was asked; the message has its words."""


class Connection:
    """The API server."""

    def __init__(self, session: aiohttp.ClientSession, server: str) -> None:
        self._session = session
        self._server = server

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send one request and return the decoded answer.

        Raises:
            CallError: its status is not one of success.
        """
        limit = aiohttp.ClientTimeout(total=_CALL_SECONDS)
        async with self._session.request(method, self._server + path, json=body, timeout=limit) as answer:
            text = await answer.text()
        if answer.status >= 300:
            raise CallError(f"{method} {path}: {answer.status} {text[:500]}")
        return json.loads(text)

    async def watch(self, path: str, heard: Heard) -> None:
        """Report all objects of a collection and every change, until cancelled."""
        while True:
            # If the server ends the watch or has compacted its version, the watch restarts with all objects.
            try:
                await self._watch_once(path, heard)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _watch_once(self, path: str, heard: Heard) -> None:
        endless = aiohttp.ClientTimeout(total=None)
        url = f"{self._server}{path}?watch=true"
        async with self._session.get(url, timeout=endless, read_bufsize=_MAX_LINE) as answer:
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                heard(event["type"], event["object"])

    async def metrics(self, family: str) -> list[Sample]:
        """Return the API server's own samples of a family."""
        async with self._session.get(f"{self._server}/metrics") as answer:
            return samples(await answer.text(), family)


def samples(text: str, family: str) -> list[Sample]:
    """Return the samples of a family in Prometheus' text format."""
    # An API server answers with megabytes, of which only a few lines are needed.
    lines = [line for line in text.splitlines() if line.startswith(family)]
    parsed = text_string_to_metric_families("\n".join([*lines, ""]))
    return [sample for metric in parsed for sample in metric.samples if sample.name == family]


@asynccontextmanager
async def connect() -> AsyncIterator[Connection]:
    """Connect as the kubeconfig of KUBECONFIG says."""
    settings = Configuration()
    await config.load_kube_config(os.environ["KUBECONFIG"], client_configuration=settings)  # type: ignore[no-untyped-call]
    context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
    assert settings.cert_file is not None, "the administrator of the one-node cluster has a certificate"
    context.load_cert_chain(settings.cert_file, settings.key_file)
    connector = aiohttp.TCPConnector(ssl=context, limit=64)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Connection(session, settings.host)
