"""The sandbox image: the process that holds a pod's namespaces. Called by `up` before containerd starts."""

from __future__ import annotations

from tools.cluster.images.static import ensure_static_image, static_tag
from tools.cluster.layout import Layout

_MODULE = "pause"
REPOSITORY = f"ppojob/{_MODULE}"


def ensure_pause_image(layout: Layout) -> str:
    """Build and push the sandbox image unless the registry has it; return its name."""
    return ensure_static_image(layout, _MODULE, path="/pause")


def tag(layout: Layout) -> str:
    """The hash of the program's sources."""
    return static_tag(layout, _MODULE)
