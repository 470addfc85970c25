"""The sandbox image: the process that holds a pod's namespaces. Called by `up` before containerd starts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.cluster import binaries, registry
from tests.cluster.images import buildah
from tests.cluster.layout import Layout

REPOSITORY = "ppojob/pause"
_CONTAINERFILE = 'FROM scratch\nCOPY --chown=65535:65535 pause /pause\nUSER 65535\nENTRYPOINT ["/pause"]\n'


def ensure_pause_image(layout: Layout) -> str:
    """Build and push the sandbox image unless the registry has it; return its name."""
    binary = layout.bin / "pause"
    name = registry.reference(REPOSITORY, tag(layout))
    if registry.has(REPOSITORY, tag(layout)):
        return name
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        (context / "pause").write_bytes(binary.read_bytes())
        (context / "pause").chmod(0o755)
        containerfile = context / "Containerfile"
        containerfile.write_text(_CONTAINERFILE)
        buildah.build(layout, context, tag=name, containerfile=containerfile)
    buildah.push(layout, name)
    buildah.remove(layout, name)
    return name


def tag(layout: Layout) -> str:
    """The hash of the program's sources."""
    return binaries.assets(layout, "pause").name.rpartition("-")[2]
