"""Lets image builds use the host's uv, its cache and its certificates, so that nothing is downloaded twice."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tools.cluster.command import run
from tools.cluster.layout import PROJECT

HOST_CERTIFICATES = Path("/etc/ssl/certs")
_UV_OF_MAKE = PROJECT / ".build" / "uv" / "bin" / "uv"
"""Where `make install` puts it on a host that has none."""


def build_arguments() -> list[str]:
    """Options for `buildah build`; without uv on the host the Containerfile lets pip bring it."""
    arguments = []
    if HOST_CERTIFICATES.is_dir():
        arguments.append(f"--volume={HOST_CERTIFICATES}:/etc/ssl/certs:ro")
    if index := os.environ.get("UV_DEFAULT_INDEX"):
        arguments.append(f"--build-arg=UV_DEFAULT_INDEX={index}")
    if uv := shutil.which("uv") or shutil.which(_UV_OF_MAKE):
        # uv passes its own path to its child processes; the uv on PATH may be a version manager's script.
        binary = run([uv, "run", "--no-project", "--offline", "printenv", "UV"], limit=60).strip()
        cache = run([uv, "cache", "dir"], limit=60).strip()
        arguments += [f"--volume={binary}:/run/uv/uv:ro", f"--volume={cache}:/var/cache/uv"]
    return arguments
