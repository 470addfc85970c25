"""The root file systems of our images, made from Debian packages by mmdebstrap. Called by `recipes`.

They replace the Python and CUDA bases of a production build; no image is pulled. A base is kept in buildah's
store, keyed by the distribution and the packages.
"""

from __future__ import annotations

import hashlib
import platform
import tempfile
from pathlib import Path

from tools.cluster.command import run
from tools.cluster.errors import ClusterError
from tools.cluster.images import buildah
from tools.cluster.layout import Layout

BOOTSTRAP_LIMIT_SECONDS = 900.0
OPERATOR_PACKAGES = ("bash", "ca-certificates", "python3", "python3-venv")
# A compiler: one of the pinned packages has no wheel, and torch.compile needs one when it runs.
TRAINER_PACKAGES = (*OPERATOR_PACKAGES, "g++", "libgomp1", "libnuma1", "procps", "python3-dev")
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
# The host's own sources know the mirror that it can reach; without them mmdebstrap takes its default.
_SOURCES = (
    Path("/etc/apt/sources.list.d/debian.sources"),
    Path("/etc/apt/sources.list.d/ubuntu.sources"),
    Path("/etc/apt/sources.list"),
)
_CONTAINERFILE = "FROM scratch\nADD base.tar /\n"


def name(packages: tuple[str, ...]) -> str:
    """The base image with these packages of the host's distribution."""
    digest = hashlib.sha256(f"{_suite()} {sorted(packages)} {_LEFT_OUT}".encode()).hexdigest()
    return f"localhost/ppojob-base:{digest[:16]}"


def ensure(layout: Layout, packages: tuple[str, ...], *, log: Path) -> str:
    """Make the base unless the store has it; return its name. Takes about a minute and a half.

    Raises:
        ClusterError: mmdebstrap or buildah fails; `log` says why.
    """
    image = name(packages)
    if buildah.has_image(layout, image):
        return image
    with tempfile.TemporaryDirectory(prefix="ppojob-base-") as folder:
        context = Path(folder)
        run(
            [
                *("nice", "-n", "5", "mmdebstrap", "--mode=root", "--format=tar", "--variant=minbase"),
                f"--include={','.join(packages)}",
                *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
                *(_suite(), context / "base.tar"),
                *(str(path) for path in _SOURCES if path.is_file() and path.stat().st_size > 0),
            ],
            limit=BOOTSTRAP_LIMIT_SECONDS,
            log=log,
        )
        containerfile = context / "Containerfile"
        containerfile.write_text(_CONTAINERFILE)
        buildah.build(layout, context, tag=image, containerfile=containerfile, log=log)
    return image


def _suite() -> str:
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    if not codename:
        raise ClusterError("/etc/os-release names no VERSION_CODENAME; the base images need a Debian or Ubuntu host")
    return codename
