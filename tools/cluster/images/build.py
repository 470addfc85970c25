"""Builds an image of ours and pushes it to the local registry, unless it is there. Called by `image` and the tests.

Only the layer with our code changes from day to day; the dependencies' layer (7 GB for the trainer) stays where it is
in buildah's store, in the registry and in containerd.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.cluster import registry
from tools.cluster.errors import ClusterError
from tools.cluster.images import base, buildah
from tools.cluster.images.prune import prune
from tools.cluster.images.recipes import RECIPES, Recipe
from tools.cluster.images.uv import build_arguments
from tools.cluster.kubernetes import apply, get_json, kubectl
from tools.cluster.layout import Layout
from tools.cluster.processes import Processes
from tools.cluster.stages import Stages
from tools.cluster.waiting import wait_until

PULL_LIMIT_SECONDS = 900.0
PULL_NAMESPACE = "kube-system"
_HOPELESS = {"InvalidImageName", "CreateContainerError", "RunContainerError"}
_PULL_FAILED = {"ErrImagePull", "ImagePullBackOff"}


@dataclass(frozen=True)
class Image:
    """An image in the registry; `was_built` is False if it stood already.

    `has_new_dependencies`: its dependencies' layer was built too, so an older one may lie about.
    """

    repository: str
    tag: str
    was_built: bool
    has_new_dependencies: bool = False

    @property
    def name(self) -> str:
        """What a pod's `image` says."""
        return registry.reference(self.repository, self.tag)


def ensure(layout: Layout, recipe: Recipe) -> Image:
    """Build and push the image of the working tree as it is now. The registry must run.

    Raises:
        ClusterError: a part of it fails; the log says why.
    """
    tag = recipe.tag()
    if registry.has(recipe.repository, tag):
        return Image(recipe.repository, tag, was_built=False)
    log = layout.log(f"image-{recipe.repository.replace('/', '-')}")
    name = registry.reference(recipe.repository, tag)
    with tempfile.TemporaryDirectory(prefix="ppojob-image-") as folder:
        context = Path(folder)
        recipe.copy_context(context)
        has_new_dependencies = _build(layout, recipe, context, name, log)
    buildah.push(layout, name, log=log)
    # The registry has it now; the store needs only what the next build stands on.
    buildah.remove(layout, name)
    return Image(recipe.repository, tag, was_built=True, has_new_dependencies=has_new_dependencies)


def _build(layout: Layout, recipe: Recipe, context: Path, name: str, log: Path) -> bool:
    """Build the two stages one by one; True if the dependencies' stage was built too.

    That stage is kept under a separate tag: buildah's cache forgets a layer when an unrelated image is removed.
    """
    dependencies = f"{recipe.dependencies_image}:{recipe.dependencies_tag(context)}"
    is_new = not buildah.has_image(layout, dependencies)
    if is_new:
        base_name = base.ensure(layout, recipe.packages, log=log)
        buildah.build(
            layout,
            context,
            tag=dependencies,
            containerfile=context / recipe.containerfile,
            arguments=[
                *("--target=dependencies", f"--build-arg=BASE={base_name}"),
                *(*recipe.build_arguments, *build_arguments()),
            ],
            log=log,
        )
    code = context / "Containerfile.code"
    code.write_text(f"FROM {dependencies}\n{recipe.stages(context)[1]}")
    buildah.build(layout, context, tag=name, containerfile=code, arguments=build_arguments(), log=log)
    return is_new


def ensure_in_cluster(layout: Layout, stages: Stages, name: str, *, fetch: bool = True) -> Image:
    """The image `name` (operator, trainer) of the working tree: in the registry and, with `fetch`, in the node.

    Raises:
        ClusterError: there is no such image.
        StageFailed: building or fetching failed; it has been reported.
    """
    if name not in RECIPES:
        raise ClusterError(f"no image is called {name!r}; there are: {', '.join(RECIPES)}")
    with stages.stage(f"image {name}") as stage:
        registry.ensure(layout, Processes(layout))
        image = ensure(layout, RECIPES[name])
        stage.note = image.name if image.was_built else f"{image.name}, built before"
    if fetch:
        with stages.stage(f"the node fetches the {name} image"):
            pull(layout, image)
    if image.has_new_dependencies:
        with stages.stage("remove unused images") as stage:
            stage.note = ", ".join(prune(layout)) or "none"
    return image


def pull(layout: Layout, image: Image) -> None:
    """Let the node fetch and unpack the image now, so that the first pod need not wait for it.

    A pod that ends at once does it: ctr would fetch every layer again, also those that the node has unpacked.

    Raises:
        ClusterError: the registry does not have it, or it takes too long.
    """
    pod = f"pull-{image.repository.rpartition('/')[2]}-{image.tag}"
    container = {"name": "pull", "image": image.name, "imagePullPolicy": "IfNotPresent", "command": ["/bin/true"]}
    spec = {"restartPolicy": "Never", "enableServiceLinks": False, "containers": [container]}
    metadata = {"name": pod, "namespace": PULL_NAMESPACE}
    try:
        apply(layout, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        wait_until(f"the node to fetch {image.name}", lambda: _unfetched(layout, pod), limit=PULL_LIMIT_SECONDS)
    finally:
        arguments = ("--ignore-not-found", "--wait=false", "--grace-period=0")
        kubectl(layout, "delete", "pod", pod, f"--namespace={PULL_NAMESPACE}", *arguments)


def _unfetched(layout: Layout, pod: str) -> str:
    """Why the pull pod has not ended, "" if it has; a state that waiting cannot cure is raised."""
    status = get_json(layout, "pod", pod, f"--namespace={PULL_NAMESPACE}")["status"]
    if status["phase"] == "Succeeded":
        return ""
    waiting = [
        container["state"]["waiting"]
        for container in status.get("containerStatuses", [])
        if "waiting" in container["state"]
    ]
    reason = "; ".join(f"{state['reason']}: {state.get('message', '')}" for state in waiting)
    if status["phase"] == "Failed" or any(map(_is_hopeless, waiting)):
        raise ClusterError(f"the pod {PULL_NAMESPACE}/{pod} cannot start: {reason or status}")
    return reason or f"the pod {PULL_NAMESPACE}/{pod} is {status['phase']}"


def _is_hopeless(state: dict[str, str]) -> bool:
    """Whether the kubelet will not start the container. It tries again where a busy registry did not answer in time."""
    is_missing = state["reason"] in _PULL_FAILED and "not found" in state.get("message", "")
    return is_missing or state["reason"] in _HOPELESS
