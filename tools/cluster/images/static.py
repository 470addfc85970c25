"""Images with one static program and nothing else, from the Go modules. Called by `up` and by the optional parts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tools.cluster import binaries, registry
from tools.cluster.images import buildah
from tools.cluster.layout import Layout


def ensure_static_image(layout: Layout, module: str, *, path: str) -> str:
    """Build and push the image with a built module's program at `path` unless the registry has it; return its name."""
    repository, tag = f"ppojob/{module}", static_tag(layout, module)
    name = registry.reference(repository, tag)
    if registry.has(repository, tag):
        return name
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        (context / module).write_bytes((layout.bin / module).read_bytes())
        (context / module).chmod(0o755)
        containerfile = context / "Containerfile"
        containerfile.write_text(
            f'FROM scratch\nCOPY --chown=65535:65535 {module} {path}\nUSER 65535\nENTRYPOINT ["{path}"]\n'
        )
        buildah.build(layout, context, tag=name, containerfile=containerfile)
    buildah.push(layout, name)
    buildah.remove(layout, name)
    return name


def static_tag(layout: Layout, module: str) -> str:
    """The hash of the program's sources."""
    return binaries.assets(layout, module).name.rpartition("-")[2]
