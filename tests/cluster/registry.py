"""The local image registry: buildah pushes to it, containerd pulls from it, only changed layers travel.

Called by `up` and by the image commands. Its blobs lie in the cache and outlive the cluster.
"""

from __future__ import annotations

import httpx
from tests.cluster.addresses import REGISTRY, REGISTRY_PORT
from tests.cluster.layout import Layout
from tests.cluster.processes import Processes
from tests.cluster.templates import render
from tests.cluster.waiting import wait_until

PROCESS = "registry"
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

    wait_until("the registry", missing, limit=30, log=layout.log(PROCESS))
    return True


def has(repository: str, tag: str) -> bool:
    """True if the registry holds this image."""
    url = f"http://127.0.0.1:{REGISTRY_PORT}/v2/{repository}/manifests/{tag}"
    return httpx.head(url, headers={"Accept": _MANIFEST_TYPES}, timeout=10).status_code == httpx.codes.OK


def reference(repository: str, tag: str) -> str:
    """The image's name for pods and for buildah."""
    return f"{REGISTRY}/{repository}:{tag}"


def _unanswered() -> str:
    try:
        httpx.get(f"http://127.0.0.1:{REGISTRY_PORT}/v2/", timeout=5).raise_for_status()
    except httpx.HTTPError as error:
        return f"an answer from the registry ({error})"
    return ""
