"""Fills in the configuration files of tools/cluster/config (`$name` placeholders). Called by the starting modules."""

from __future__ import annotations

from pathlib import Path
from string import Template

from tools.cluster.layout import CONFIG_TEMPLATES, Layout


def render(layout: Layout, name: str, **values: object) -> Path:
    """Write the template `name`, filled with `values` and the layout's paths, to the state's config folder."""
    return render_as(layout, name, name, **values)


def render_as(layout: Layout, name: str, file_name: str, **values: object) -> Path:
    """As `render`, under another file name."""
    text = fill(name, **paths(layout), **values)
    target = layout.config / file_name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return target


def fill(name: str, **values: object) -> str:
    """The template `name` with every `$placeholder` replaced. A missing value is an error of ours (KeyError)."""
    return Template((CONFIG_TEMPLATES / name).read_text()).substitute(values)


def paths(layout: Layout) -> dict[str, object]:
    """The values that most templates need."""
    return {
        "certificates": layout.certificates,
        "config": layout.config,
        "containerd_root": layout.containerd_root,
        "containerd_socket": layout.containerd_socket,
        "runtime": layout.runtime,
        "registry": layout.registry,
    }
