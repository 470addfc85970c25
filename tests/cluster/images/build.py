"""Builds an image of ours and pushes it to the local registry, unless it is there. Called by `image` and the tests.

Only the layer with our code changes from day to day; the dependencies' layer (7 GB for the trainer) stays where it is
in buildah's store, in the registry and in containerd.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import registry
from tests.cluster.errors import ClusterError
from tests.cluster.images import base, buildah
from tests.cluster.images.recipes import RECIPES, Recipe
from tests.cluster.images.uv import build_arguments
from tests.cluster.kubernetes import apply, get_json, kubectl
from tests.cluster.layout import Layout
from tests.cluster.processes import Processes
from tests.cluster.stages import Stages
from tests.cluster.waiting import wait_until

PULL_LIMIT_SECONDS = 900.0
PULL_NAMESPACE = "kube-system"
_HOPELESS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerError", "RunContainerError"}


@dataclass(frozen=True)
class Image:
    """An image in the registry; `was_built` is False if it stood already."""

    repository: str
    tag: str
    was_built: bool

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
    image = Image(recipe.repository, tag, was_built=True)
    base_name = base.ensure(layout, recipe.packages, log=log)
    with tempfile.TemporaryDirectory(prefix="ppojob-image-") as folder:
        context = Path(folder)
        recipe.copy_context(context)
        buildah.build(
            layout,
            context,
            tag=image.name,
            containerfile=context / recipe.containerfile,
            arguments=[f"--build-arg=BASE={base_name}", *recipe.build_arguments, *build_arguments()],
            log=log,
        )
    buildah.push(layout, image.name, log=log)
    return image


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
    return image


def pull(layout: Layout, image: Image) -> None:
    """Let the node fetch and unpack the image now, so that the first pod need not wait for it.

    A pod that ends at once does it: ctr would fetch every layer anew, also those that the node has unpacked.

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
    if status["phase"] == "Failed" or any(state["reason"] in _HOPELESS for state in waiting):
        raise ClusterError(f"the pod {PULL_NAMESPACE}/{pod} cannot start: {reason or status}")
    return reason or f"the pod {PULL_NAMESPACE}/{pod} is {status['phase']}"
