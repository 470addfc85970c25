"""KubeRay: its CRDs in the cluster and its operator as a process beside it. Called by `up`."""

from __future__ import annotations

import httpx

from tools.cluster.addresses import KUBERAY_HEALTH_PORT, KUBERAY_METRICS_PORT
from tools.cluster.binaries import assets
from tools.cluster.kubernetes import kubectl
from tools.cluster.layout import Layout
from tools.cluster.processes import Processes
from tools.cluster.waiting import wait_until

PROCESS = "kuberay"
CRD_NAME = "rayclusters.ray.io"
RECONCILERS = 8
"""RayClusters that KubeRay reconciles at the same time, as docs/install.md recommends. Its default is 1."""


def install_crds(layout: Layout) -> None:
    """Apply the CRDs that the module ships (too large for client-side apply) and wait until they are served."""
    folder = assets(layout, "kuberay") / "crds"
    kubectl(layout, "apply", "--server-side", "--force-conflicts", f"--filename={folder}", limit=120)
    # A definition that was made this moment has no conditions yet, and on those `kubectl wait` fails at once.
    for sign in ("jsonpath={.status.conditions}", "condition=Established"):
        kubectl(layout, "wait", f"--for={sign}", f"crd/{CRD_NAME}", "--timeout=100s", limit=120)


def start(layout: Layout, processes: Processes) -> None:
    """Start the operator and wait until its caches are full."""
    processes.start(
        PROCESS,
        [
            layout.bin / "ray-operator",
            "--enable-leader-election=false",
            f"--reconcile-concurrency={RECONCILERS}",
            f"--metrics-addr=127.0.0.1:{KUBERAY_METRICS_PORT}",
            f"--health-probe-bind-address=127.0.0.1:{KUBERAY_HEALTH_PORT}",
        ],
        environment={"KUBECONFIG": str(layout.config / "kuberay.kubeconfig")},
    )

    def missing() -> str:
        processes.require_running(PROCESS)
        try:
            httpx.get(f"http://127.0.0.1:{KUBERAY_HEALTH_PORT}/readyz", timeout=5).raise_for_status()
        except httpx.HTTPError as error:
            return f"KubeRay's readiness ({error})"
        return ""

    wait_until("KubeRay", missing, limit=180, log=layout.log(PROCESS))
