"""Faults of a job and of the cluster that it runs on. The tests of faults and the soak inject them."""

import os
import signal
import time
from collections.abc import Callable

from tests.e2e.conftest import Site
from tools.cluster import kuberay
from tools.cluster.addresses import NODE_NAME
from tools.cluster.cluster import is_healthy
from tools.cluster.processes import Processes
from tools.cluster.waiting import wait_until

ACTOR, CRITIC = "ppojob.dev/pool=actor", "ppojob.dev/pool=critic"
HEAD = "ray.io/node-type=head"
KILL = """
import os, pathlib, re, sys
for folder in sorted(pathlib.Path("/proc").glob("[0-9]*"), key=lambda each: int(each.name)):
    try:
        command = (folder / "cmdline").read_bytes().replace(bytes(1), b" ").decode()
    except OSError:
        continue
    if int(folder.name) != os.getpid() and re.search(sys.argv[1], command):
        os.kill(int(folder.name), int(sys.argv[2]))
        print(command)
        break
else:
    sys.exit(f"no process is {sys.argv[1]}")
"""
"""Sends a signal to the first process whose command line has a match."""
Injection = Callable[[Site, str], None]
"""Injects a fault: called with the site and the job's name."""


def pods(site: Site, job: str, selector: str) -> list[str]:
    """Return the names of a job's pods with the selector."""
    found = site.get("pods", f"--selector=ppojob.dev/job={job},{selector}")["items"]
    return sorted(pod["metadata"]["name"] for pod in found)


def delete_pod(selector: str) -> Injection:
    """Delete the last pod with the selector by force."""

    def inject(site: Site, job: str) -> None:
        site.kubectl("delete", "pod", pods(site, job, selector)[-1], "--force", "--grace-period=0")

    return inject


def send_signal(selector: str, command: str, number: signal.Signals = signal.SIGKILL) -> Injection:
    """Send a signal to the first process of the last pod with the selector whose command line has a match."""

    def inject(site: Site, job: str) -> None:
        container = "ray-head" if selector == HEAD else "ray-worker"
        where = (pods(site, job, selector)[-1], f"--container={container}")
        site.kubectl("exec", *where, "--", "python", "-c", KILL, command, str(int(number)))

    return inject


def drain(site: Site, job: str) -> None:
    """Drain the node of the critic's pods, and permit pods on it again once they are gone."""
    selector = f"--pod-selector=ppojob.dev/job={job},{CRITIC}"
    try:
        site.kubectl("drain", NODE_NAME, selector, "--force", "--delete-emptydir-data", "--timeout=300s", limit=330)
    finally:
        site.kubectl("uncordon", NODE_NAME)


def delete_cluster(site: Site, job: str) -> None:
    """Delete the RayCluster."""
    site.kubectl("delete", "raycluster", site.job(job)["status"]["rayCluster"]["name"], "--wait=false")


def delete_operator(site: Site, _: str) -> None:
    """Delete the operator's pod by force."""
    site.kubectl("delete", "pods", "--selector=app.kubernetes.io/name=ppojob-operator", "--force", "--grace-period=0")


def kill_component(name: str, outage: float) -> Injection:
    """Kill a process of the cluster (SIGKILL), and start it again after `outage` seconds."""

    def inject(site: Site, _: str) -> None:
        layout = site.cluster.layout
        processes = Processes(layout)
        record = processes.record(name)
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        time.sleep(outage)
        processes.stop(name)
        if name == kuberay.PROCESS:
            kuberay.start(layout, processes)
        else:
            processes.start(name, record.command)
        wait_until("the API server", lambda: "" if is_healthy(layout) else "not ready", limit=120, interval=1)

    return inject
