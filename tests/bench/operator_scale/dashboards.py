"""One server in place of the Ray dashboards of all fake heads: the only thing in the bench that is not real.

Pods on nodes that exist only in the API server answer nobody. The bench leads what is meant for port 8265 of their
addresses to this server, which answers `/api/jobs/` as Ray does: what was submitted to an address runs there.
"""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from ppojob_api.v1alpha1.constants import RAY_HEAD_PORTS
from tools.cluster.addresses import FAKE_POD_CIDR

LOCK = Path(tempfile.gettempdir()) / "ppojob-fake-dashboards.lock"
"""Its holder has the machine's only rule for the fake heads' addresses."""


class Dashboards:
    """What was submitted, by the address that it was sent to."""

    def __init__(self) -> None:
        self.submitted: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.num_looks = 0

    def application(self) -> web.Application:
        """Return the server."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/api/jobs/", self._listed),
                web.post("/api/jobs/", self._submit),
                web.post("/api/jobs/{id}/stop", self._stop),
            ]
        )
        return application

    def end(self, submission_id: str, state: str) -> None:
        """Let a submission end in one of Ray's states."""
        [job] = [job for jobs in self.submitted.values() for job in jobs if job["submission_id"] == submission_id]
        job["status"] = state

    async def _listed(self, request: web.Request) -> web.Response:
        self.num_looks += 1
        return web.json_response(self.submitted[request.host])

    async def _stop(self, request: web.Request) -> web.Response:
        """Stop a submission. A new head may have the address of an earlier one, and so its submissions."""
        self.end(request.match_info["id"], "STOPPED")
        return web.json_response({"stopped": True})

    async def _submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        job = {"submission_id": body["submission_id"], "status": "RUNNING", "metadata": body["metadata"]}
        self.submitted[request.host].append({**job, "driver_node_id": "fake"})
        return web.json_response({"submission_id": body["submission_id"]})


@asynccontextmanager
async def serving() -> AsyncIterator[Dashboards]:
    """Serve, and lead the fake heads' traffic here; the rule goes at the end."""
    dashboards = Dashboards()
    runner = web.AppRunner(dashboards.application(), access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        with redirected(runner.addresses[0][1]):
            yield dashboards
    finally:
        await runner.cleanup()


@contextmanager
def redirected(port: int) -> Iterator[None]:
    """Lead this machine's own connections to the fake heads' dashboards to a port of this machine.

    There is one such rule at a time: a second process that needs one waits until the first has removed its own.
    """
    rule = [
        "OUTPUT",
        *("--protocol", "tcp", "--destination", FAKE_POD_CIDR, "--dport", str(RAY_HEAD_PORTS["dashboard"])),
        *("--jump", "REDIRECT", "--to-ports", str(port)),
    ]
    change = ["iptables", "--wait", "--table", "nat"]
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([*change, "--insert", *rule], check=True, timeout=240)
        try:
            yield
        finally:
            subprocess.run([*change, "--delete", *rule], check=True, timeout=240)
