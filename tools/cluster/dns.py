"""CoreDNS, a process on the node's address: KubeRay's workers find their head by the name of its service."""

from __future__ import annotations

from pathlib import Path

import httpx

from tools.cluster.addresses import CLUSTER_DOMAIN, COREDNS_HEALTH_PORT, NODE_IP
from tools.cluster.layout import Layout
from tools.cluster.processes import Processes
from tools.cluster.templates import render
from tools.cluster.waiting import wait_until

PROCESS = "coredns"
HOST_RESOLVER = Path("/etc/resolv.conf")


def start(layout: Layout, processes: Processes, *, has_upstream: bool = True) -> None:
    """Start CoreDNS and wait until it is healthy; names outside the cluster go to the host's name servers, if any."""
    config = render(
        layout,
        "Corefile",
        node_ip=NODE_IP,
        cluster_domain=CLUSTER_DOMAIN,
        health_port=COREDNS_HEALTH_PORT,
        upstream=_upstream(has_upstream),
    )
    processes.start(PROCESS, [layout.bin / "coredns", f"-conf={config}"])

    def missing() -> str:
        processes.require_running(PROCESS)
        try:
            httpx.get(f"http://127.0.0.1:{COREDNS_HEALTH_PORT}/health", timeout=5).raise_for_status()
        except httpx.HTTPError as error:
            return f"CoreDNS's health ({error})"
        return ""

    wait_until("CoreDNS", missing, limit=240, log=layout.log(PROCESS))


def _upstream(has_upstream: bool) -> str:
    if has_upstream and HOST_RESOLVER.is_file() and "nameserver" in HOST_RESOLVER.read_text():
        return f"forward . {HOST_RESOLVER}"
    # Without this a foreign name would be refused, and resolvers then try again for seconds.
    return "template ANY ANY . {\n        rcode NXDOMAIN\n    }"
