"""buildah with the image store of our cache. Called by the modules that build an image."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tools.cluster.command import run, succeeds
from tools.cluster.layout import Layout

BUILD_LIMIT_SECONDS = 3600.0


def build(
    layout: Layout,
    context: Path,
    *,
    tag: str,
    containerfile: Path,
    arguments: Sequence[str] = (),
    log: Path | None = None,
) -> None:
    """Build `containerfile` with the files of `context` as the image `tag`.

    Raises:
        ClusterError: with the build's output, or `log`.
    """
    run(
        [
            *("nice", "-n", "5", *_program(layout), "build", "--isolation=chroot", "--format=oci"),
            *arguments,
            f"--file={containerfile}",
            f"--tag={tag}",
            context,
        ],
        limit=BUILD_LIMIT_SECONDS,
        log=log,
    )


def has_image(layout: Layout, tag: str) -> bool:
    """True if the store holds the image `tag`."""
    return succeeds([*_program(layout), "inspect", "--type=image", tag], limit=300)


def push(layout: Layout, tag: str, *, log: Path | None = None) -> None:
    """Push the image `tag` to the registry that its name begins with; layers that are there already stay put.

    zstd at its first level: several times as quick as gzip, and containerd reads it.
    """
    run(
        [
            *(*_program(layout), "push", "--tls-verify=false", "--format=oci"),
            *("--compression-format=zstd", "--compression-level=1", tag, f"docker://{tag}"),
        ],
        limit=BUILD_LIMIT_SECONDS,
        log=log,
    )


def names(layout: Layout) -> list[str]:
    """The names of the images in the store."""
    images = json.loads(run([*_program(layout), "images", "--json"], limit=120)) or []
    return [name for image in images for name in image.get("names") or []]


def remove(layout: Layout, tag: str) -> None:
    """Forget the image `tag`; its layers go too, unless another image stands on them."""
    run([*_program(layout), "rmi", "--force", tag], limit=300)


def remove_unnamed(layout: Layout) -> None:
    """Forget the images without a name: what interrupted builds left."""
    run([*_program(layout), "rmi", "--prune", "--force"], limit=300)


def _program(layout: Layout) -> list[str]:
    return ["buildah", f"--root={layout.image_store}", f"--runroot={layout.image_runtime}"]
