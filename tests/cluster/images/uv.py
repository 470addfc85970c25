"""Lends the host's uv, its cache and its certificates to image builds, so that nothing is downloaded twice."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.cluster.command import run

HOST_CERTIFICATES = Path("/etc/ssl/certs")


def build_arguments() -> list[str]:
    """Options for `buildah build`; without uv on the host the Containerfile lets pip bring it."""
    arguments = []
    if HOST_CERTIFICATES.is_dir():
        arguments.append(f"--volume={HOST_CERTIFICATES}:/etc/ssl/certs:ro")
    if index := os.environ.get("UV_DEFAULT_INDEX"):
        arguments.append(f"--build-arg=UV_DEFAULT_INDEX={index}")
    if shutil.which("uv") is not None:
        # uv tells its children where it lies; what PATH names may be a version manager's script.
        binary = run(["uv", "run", "--no-project", "--offline", "printenv", "UV"], limit=60).strip()
        cache = run(["uv", "cache", "dir"], limit=60).strip()
        arguments += [f"--volume={binary}:/run/uv/uv:ro", f"--volume={cache}:/var/cache/uv"]
    return arguments
