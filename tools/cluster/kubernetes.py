"""kubectl against the cluster of a layout. Everything that speaks to the API server from outside calls this."""

from __future__ import annotations

import json
from typing import Any

from tools.cluster.command import run
from tools.cluster.errors import ClusterError
from tools.cluster.layout import Layout

DEFAULT_LIMIT_SECONDS = 120.0


def kubectl(layout: Layout, *arguments: str, limit: float = DEFAULT_LIMIT_SECONDS, stdin: str | None = None) -> str:
    """Run kubectl as the administrator and return its output.

    Raises:
        ClusterError: with kubectl's message.
    """
    command = [str(layout.bin / "kubectl"), f"--kubeconfig={layout.kubeconfig}", *arguments]
    return run(command, limit=limit, stdin=stdin)


def kubectl_succeeds(
    layout: Layout, *arguments: str, limit: float = DEFAULT_LIMIT_SECONDS, stdin: str | None = None
) -> bool:
    """True if kubectl ends with 0 within the limit."""
    try:
        kubectl(layout, *arguments, limit=limit, stdin=stdin)
    except ClusterError:
        return False
    return True


def get_json(layout: Layout, *arguments: str) -> Any:
    """`kubectl get ... --output=json`, parsed."""
    return json.loads(kubectl(layout, "get", *arguments, "--output=json"))


def apply(layout: Layout, *objects: dict[str, Any]) -> None:
    """Server-side apply of the objects, as the field manager `ppojob-test-cluster`."""
    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    kubectl(
        layout,
        "apply",
        "--server-side",
        "--force-conflicts",
        "--field-manager=ppojob-test-cluster",
        "--filename=-",
        stdin=manifest,
    )
