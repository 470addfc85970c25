"""The Debian packages that the cluster stands on; only those that are missing are installed. Called by `up`."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from tools.cluster.command import run
from tools.cluster.errors import ClusterError

INSTALL_LIMIT_SECONDS = 600.0
# package -> a program on PATH, or a file, that shows it is there (however it came)
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
    "iproute2": "ip",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "mount": "umount",
}


def missing(packages: Mapping[str, str] = PACKAGES) -> list[str]:
    """The packages whose program is not here."""
    return [package for package, proof in packages.items() if not _is_there(proof)]


def ensure(packages: Mapping[str, str] = PACKAGES) -> list[str]:
    """Install missing packages and return their names. The package lists are fetched only if the first try fails.

    packages: as `PACKAGES`, by default those that every cluster needs.

    Raises:
        ClusterError: there is no apt-get, or it fails.
    """
    wanted = missing(packages)
    if not wanted:
        return []
    if shutil.which("apt-get") is None:
        raise ClusterError(f"these packages are missing, and there is no apt-get to install them: {', '.join(wanted)}")
    with contextlib.suppress(ClusterError):
        _apt_get("install", "--yes", "--no-install-recommends", *wanted)
    still = missing(packages)
    if still:
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *still)
    if unfit := missing(packages):
        raise ClusterError(f"apt-get installed {', '.join(unfit)}, but the programs are not on PATH")
    return wanted


def _apt_get(*arguments: str) -> None:
    command = ["apt-get", "--quiet", "-o", "DPkg::Lock::Timeout=120", *arguments]
    run(command, limit=INSTALL_LIMIT_SECONDS, environment={"DEBIAN_FRONTEND": "noninteractive"})


def _is_there(proof: str) -> bool:
    return Path(proof).exists() if proof.startswith("/") else shutil.which(proof) is not None
