"""The local image registry: buildah pushes to it, containerd pulls from it, only changed layers travel.

Called by `up` and by the image commands. Its blobs lie in the cache and outlive the cluster.
"""

from __future__ import annotations

import time

import httpx

from tools.cluster.addresses import REGISTRY, REGISTRY_PORT
from tools.cluster.layout import Layout
from tools.cluster.processes import Processes
from tools.cluster.templates import render
from tools.cluster.waiting import wait_until

PROCESS = "registry"
_URL = f"http://127.0.0.1:{REGISTRY_PORT}/v2"
_MANIFEST_TYPES = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"


def ensure(layout: Layout, processes: Processes) -> bool:
    """Start the registry unless it runs; True if it was started."""
    if processes.is_running(PROCESS):
        return False
    layout.registry.mkdir(parents=True, exist_ok=True)
    config = render(layout, "registry.yaml", registry_port=REGISTRY_PORT)
    # The trace exporter would look for a collector on the loopback address.
    environment = {"OTEL_TRACES_EXPORTER": "none"}
    processes.start(PROCESS, [layout.bin / "registry", "serve", config], environment=environment)

    def missing() -> str:
        processes.require_running(PROCESS)
        return _unanswered()

    wait_until("the registry", missing, limit=240, log=layout.log(PROCESS))
    return True


def has(repository: str, tag: str) -> bool:
    """True if the registry holds this image."""
    url = f"{_URL}/{repository}/manifests/{tag}"
    return httpx.head(url, headers={"Accept": _MANIFEST_TYPES}, timeout=60).status_code == httpx.codes.OK


def images() -> list[tuple[str, str]]:
    """Every repository and tag that the registry holds."""
    found = []
    for repository in httpx.get(f"{_URL}/_catalog", timeout=30).raise_for_status().json()["repositories"]:
        # null, and not an empty list, where the last tag was deleted.
        tags = httpx.get(f"{_URL}/{repository}/tags/list", timeout=30).raise_for_status().json()["tags"] or []
        found += [(repository, tag) for tag in tags]
    return found


def delete(repository: str, tag: str) -> None:
    """Delete the tag and not its digest, which another tag may share; the collector takes what has no tag left."""
    httpx.delete(f"{_URL}/{repository}/manifests/{tag}", timeout=30).raise_for_status()


def age_seconds(layout: Layout, repository: str, tag: str) -> float:
    """The seconds since the tag was pushed."""
    tags = layout.registry / "docker/registry/v2/repositories" / repository / "_manifests/tags"
    return time.time() - (tags / tag / "current" / "link").stat().st_mtime


def reference(repository: str, tag: str) -> str:
    """The image's name for pods and for buildah."""
    return f"{REGISTRY}/{repository}:{tag}"


def _unanswered() -> str:
    try:
        httpx.get(f"{_URL}/", timeout=5).raise_for_status()
    except httpx.HTTPError as error:
        return f"an answer from the registry ({error})"
    return ""
