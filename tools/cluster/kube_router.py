"""kube-router's firewall, an optional part of the cluster: it enforces NetworkPolicies, which the bridge does not.

Called by the tests that need it. Its routes and its service proxy are off: bridge and kube-proxy stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tools.cluster import binaries, system_packages
from tools.cluster.addresses import NODE_NAME, SERVICE_CIDR
from tools.cluster.command import run
from tools.cluster.iptables import has_chain, remove_chains
from tools.cluster.layout import Layout
from tools.cluster.processes import Processes
from tools.cluster.waiting import wait_until

PROCESS = "kube-router"
_PACKAGES = {"ipset": "ipset"}
_FORWARD_CHAIN = "KUBE-ROUTER-FORWARD"
CHAINS = re.compile(r"^KUBE-(ROUTER|POD-FW|NWPLCY)-")
_SETS = re.compile(r"^(KUBE-(SRC|DST)-|kube-router-)")
_START_LIMIT_SECONDS = 240.0


@contextmanager
def enforced(layout: Layout) -> Iterator[None]:
    """Build kube-router (some minutes, once), let it enforce NetworkPolicies, and remove its rules at the end.

    Raises:
        ClusterError: the build fails, the process ends, or it has written no rules after four minutes.
    """
    system_packages.ensure(_PACKAGES)
    binaries.ensure(layout, binaries.KUBE_ROUTER)
    processes = Processes(layout)
    try:
        _start(layout, processes)
        yield
    finally:
        processes.stop(PROCESS)
        remove_chains(CHAINS)
        for name in filter(_SETS.match, run(["ipset", "list", "-name"], limit=120).split()):
            run(["ipset", "destroy", name], limit=120)


def _start(layout: Layout, processes: Processes) -> None:
    processes.start(
        PROCESS,
        [
            layout.bin / "kube-router",
            f"--kubeconfig={layout.kubeconfig}",
            f"--hostname-override={NODE_NAME}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--run-firewall=true",
            "--run-router=false",
            "--run-service-proxy=false",
        ],
        environment={"NODE_NAME": NODE_NAME},
    )

    def missing() -> str:
        processes.require_running(PROCESS)
        return "" if has_chain(_FORWARD_CHAIN) else f"the chain {_FORWARD_CHAIN}"

    wait_until("kube-router's rules", missing, limit=_START_LIMIT_SECONDS, interval=0.5, log=layout.log(PROCESS))
