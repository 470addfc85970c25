"""Where the cluster keeps its files. Every module asks here; nobody else composes a path.

Cache (survives `down`, keyed by content): binaries, container images. State (removed by `down`): certificates, process
records, logs, etcd's data, storage of the demo. Runtime (sockets): below /run, because a socket's path is limited to
108 characters. The paths do not depend on the clone, so that a second clone finds the same cluster.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
GO_MODULES = Path(__file__).resolve().parent / "go"
CONFIG_TEMPLATES = Path(__file__).resolve().parent / "config"


@dataclass(frozen=True)
class Layout:
    """The folders of one user's cluster."""

    cache: Path
    state: Path
    runtime: Path = Path("/run/ppojob-cluster")

    @classmethod
    def from_environment(cls) -> Layout:
        """The XDG folders of the user who calls."""
        home = Path.home()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
        state = Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state")
        return cls(cache=cache / "ppojob", state=state / "ppojob" / "cluster")

    @property
    def bin(self) -> Path:
        """Links to the binaries in use; this folder goes on PATH."""
        return self.cache / "bin"

    @property
    def builds(self) -> Path:
        """One folder for each built version of a Go module."""
        return self.cache / "builds"

    @property
    def image_store(self) -> Path:
        """buildah's images and layers."""
        return self.cache / "containers"

    @property
    def image_runtime(self) -> Path:
        """buildah's mounts and locks while it builds."""
        return self.runtime.with_name(f"{self.runtime.name}-images")

    @property
    def registry(self) -> Path:
        """The local registry's blobs."""
        return self.cache / "registry"

    @property
    def containerd_root(self) -> Path:
        """containerd's pulled and unpacked images: a cache too, unpacking 6 GB takes minutes."""
        return self.cache / "containerd"

    @property
    def certificates(self) -> Path:
        return self.state / "certificates"

    @property
    def config(self) -> Path:
        """The templates of tools/cluster/config, filled in."""
        return self.state / "config"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def processes(self) -> Path:
        """One record for each process that was started."""
        return self.state / "processes"

    @property
    def claims(self) -> Path:
        """What was on the machine before this cluster, of the traces that have the same name for every cluster."""
        return self.state / "claims"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.config / "admin.kubeconfig"

    @property
    def storage(self) -> Path:
        """The folder behind the cluster's ReadWriteMany volumes."""
        return self.state / "storage"

    @property
    def kubelet(self) -> Path:
        return self.state / "kubelet"

    @property
    def etcd(self) -> Path:
        return self.state / "etcd"

    @property
    def containerd_socket(self) -> Path:
        return self.runtime / "containerd.sock"

    @property
    def lock(self) -> Path:
        """Held while the cluster is started or stopped."""
        return self.cache / "cluster.lock"

    @property
    def pauses_lock(self) -> Path:
        """Shared by all who have the operators paused."""
        return self.cache / "operators-paused.lock"

    def log(self, name: str) -> Path:
        """The log file of the process or build `name`."""
        return self.logs / f"{name}.log"
