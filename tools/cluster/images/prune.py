"""Removes the images that nothing needs any more: a change of the requirements leaves 17 GB of old layers behind.

Called by the command `prune`, and after a new dependencies' layer was built. What the working tree, the node's pods or
the sandboxes use stays, and so does what is younger than an hour.
"""

from __future__ import annotations

from tools.cluster import node, registry
from tools.cluster.command import run
from tools.cluster.images import base, buildah, pause
from tools.cluster.images.recipes import RECIPES
from tools.cluster.kubernetes import get_json
from tools.cluster.layout import Layout
from tools.cluster.processes import Processes

# Somebody may have built an image and not yet started the pod that it is for.
KEPT_SECONDS = 3600.0


def prune(layout: Layout) -> list[str]:
    """Remove what is not needed from buildah's store, the registry and the node; return the removed names.

    The registry must run; it is restarted, because it collects garbage only while it stands still.
    """
    needed = _needed(layout)
    removed = [*_prune_store(layout), *_prune_registry(layout, needed)]
    if Processes(layout).is_running("containerd"):
        removed += _prune_node(layout, needed | {registry.reference(*image) for image in registry.images()})
    return removed


def _needed(layout: Layout) -> set[str]:
    names = {registry.reference(recipe.repository, recipe.tag()) for recipe in RECIPES.values()}
    names.add(registry.reference(pause.REPOSITORY, pause.tag(layout)))
    if Processes(layout).is_running("kube-apiserver"):
        for pod in get_json(layout, "pods", "--all-namespaces")["items"]:
            containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
            names |= {container["image"] for container in containers}
    return names


def _prune_store(layout: Layout) -> list[str]:
    needed = {f"{recipe.dependencies_image}:{recipe.dependencies_tag()}" for recipe in RECIPES.values()}
    needed |= {base.name(recipe.packages) for recipe in RECIPES.values()}
    unneeded = [name for name in buildah.names(layout) if name not in needed]
    for name in unneeded:
        buildah.remove(layout, name)
    buildah.remove_unnamed(layout)
    return unneeded


def _prune_registry(layout: Layout, needed: set[str]) -> list[str]:
    unneeded = [
        image
        for image in registry.images()
        if registry.reference(*image) not in needed and registry.age_seconds(layout, *image) > KEPT_SECONDS
    ]
    for image in unneeded:
        registry.delete(*image)
    if unneeded:
        processes = Processes(layout)
        processes.stop(registry.PROCESS)
        config = layout.config / "registry.yaml"
        run([layout.bin / "registry", "garbage-collect", "--delete-untagged", config], limit=600)
        registry.ensure(layout, processes)
    return [registry.reference(*image) for image in unneeded]


def _prune_node(layout: Layout, needed: set[str]) -> list[str]:
    images = node.ctr(layout, "images", "list").splitlines()[1:]
    digests: dict[str, set[str]] = {}
    for line in images:
        name, _, digest = line.split()[:3]
        digests.setdefault(digest, set()).add(name)
    # One image has several names there (tag, digest, id): all of them go, or none.
    unneeded = [sorted(names) for names in digests.values() if not names & needed]
    for names in unneeded:
        node.ctr(layout, "images", "remove", *names, limit=300)
    return [name for names in unneeded for name in names if "@" not in name and name.count(":") > 1]
