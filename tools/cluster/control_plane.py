"""etcd, the API server, the controller manager and the scheduler. Called by `up`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.cluster.addresses import (
    ALL_PODS_CIDR,
    API_PORT,
    ETCD_PEER_PORT,
    ETCD_PORT,
    NODE_IP,
    SERVICE_CIDR,
)
from tools.cluster.kubernetes import kubectl_succeeds
from tools.cluster.layout import Layout
from tools.cluster.processes import Processes
from tools.cluster.waiting import wait_until

PROCESSES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
READY_LIMIT_SECONDS = 240.0


def start(layout: Layout, processes: Processes) -> None:
    """Start the four and wait until the API server answers.

    Raises:
        ClusterError: one of them ends, or the API server is not ready in time.
    """
    _start_etcd(layout, processes)
    _start_api_server(layout, processes)
    # The two end at once if the API server's own roles are not there yet.
    _wait_for(layout, processes, ("etcd", "kube-apiserver"), _missing_api)
    _start_managers(layout, processes)
    _wait_for(layout, processes, PROCESSES, _missing_account)


def is_ready(layout: Layout) -> bool:
    """True if the API server says that it is ready."""
    return not _missing_api(layout)


def _wait_for(
    layout: Layout, processes: Processes, names: tuple[str, ...], missing_part: Callable[[Layout], str]
) -> None:
    def missing() -> str:
        for name in names:
            processes.require_running(name)
        return missing_part(layout)

    wait_until("the control plane", missing, limit=READY_LIMIT_SECONDS, interval=0.3, log=layout.log("kube-apiserver"))


def _missing_api(layout: Layout) -> str:
    is_there = layout.kubeconfig.is_file() and kubectl_succeeds(layout, "get", "--raw", "/readyz", limit=15)
    return "" if is_there else "the API server's /readyz"


def _missing_account(layout: Layout) -> str:
    is_there = kubectl_succeeds(layout, "get", "serviceaccount", "default")
    return "" if is_there else "the service account `default`, which the controller manager makes"


def _start_managers(layout: Layout, processes: Processes) -> None:
    common = ["--leader-elect=false", "--bind-address=127.0.0.1"]
    manager_config = _kubeconfig(layout, "controller-manager")
    processes.start(
        "kube-controller-manager",
        [
            layout.bin / "kube-controller-manager",
            f"--kubeconfig={manager_config}",
            f"--authentication-kubeconfig={manager_config}",
            f"--authorization-kubeconfig={manager_config}",
            f"--service-account-private-key-file={layout.certificates}/service-account.key",
            f"--root-ca-file={layout.certificates}/ca.crt",
            f"--cluster-signing-cert-file={layout.certificates}/ca.crt",
            f"--cluster-signing-key-file={layout.certificates}/ca.key",
            f"--cluster-cidr={ALL_PODS_CIDR}",
            # Each controller with its own account, as in a real cluster: missing rights then show.
            "--use-service-account-credentials=true",
            *common,
        ],
    )
    scheduler_config = _kubeconfig(layout, "scheduler")
    processes.start(
        "kube-scheduler",
        [
            layout.bin / "kube-scheduler",
            f"--kubeconfig={scheduler_config}",
            f"--authentication-kubeconfig={scheduler_config}",
            f"--authorization-kubeconfig={scheduler_config}",
            *common,
        ],
    )


def _start_etcd(layout: Layout, processes: Processes) -> None:
    url, peer_url = f"http://127.0.0.1:{ETCD_PORT}", f"http://127.0.0.1:{ETCD_PEER_PORT}"
    layout.etcd.mkdir(parents=True, exist_ok=True)
    layout.etcd.chmod(0o700)
    processes.start(
        "etcd",
        [
            layout.bin / "etcd",
            f"--data-dir={layout.etcd}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
            # A test cluster's data need not survive a power cut, and the tests are quicker.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
    )


def _start_api_server(layout: Layout, processes: Processes) -> None:
    certificates: Path = layout.certificates
    processes.start(
        "kube-apiserver",
        [
            layout.bin / "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
            f"--secure-port={API_PORT}",
            f"--advertise-address={NODE_IP}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--tls-cert-file={certificates}/apiserver.crt",
            f"--tls-private-key-file={certificates}/apiserver.key",
            f"--client-ca-file={certificates}/ca.crt",
            # No proxy is in front of this server, but its clients look for the setting every few seconds.
            f"--requestheader-client-ca-file={certificates}/ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certificates}/service-account.pub",
            f"--service-account-signing-key-file={certificates}/service-account.key",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--kubelet-certificate-authority={certificates}/ca.crt",
            f"--kubelet-client-certificate={certificates}/apiserver-kubelet-client.crt",
            f"--kubelet-client-key={certificates}/apiserver-kubelet-client.key",
            # Else `kubectl logs` looks the node's name up in the host's DNS.
            "--kubelet-preferred-address-types=InternalIP",
        ],
    )


def _kubeconfig(layout: Layout, name: str) -> Path:
    return layout.config / f"{name}.kubeconfig"
