"""Kueue, an optional part of the cluster: its controller as a pod, its CRDs and webhooks.

Called by the command `kueue` and by the tests that need it. The tests remove it: its webhooks are called for every
RayCluster of the cluster, and none can be created while its pod does not run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml

from tools.cluster import binaries
from tools.cluster.images.static import ensure_static_image
from tools.cluster.kubernetes import apply, kubectl, kubectl_succeeds
from tools.cluster.layout import Layout
from tools.cluster.waiting import wait_until

NAMESPACE = "kueue-system"
_DEPLOYMENT = "kueue-controller-manager"
_CONFIG_MAP = "kueue-manager-config"
_CONFIG_FILE = "controller_manager_config.yaml"
_PROGRAM = "/manager"
_OWN_KINDS = "localqueues,clusterqueues,workloads,resourceflavors,workloadpriorityclasses"


def install(layout: Layout) -> None:
    """Build Kueue (four minutes, once), install it, and wait until its webhooks answer."""
    binaries.ensure(layout, binaries.KUEUE)
    image = ensure_static_image(layout, binaries.KUEUE.name, path=_PROGRAM)
    objects = [_with_image(each, image) for each in _objects(layout)]
    definitions = [each for each in objects if each["kind"] in ("CustomResourceDefinition", "Namespace")]
    apply(layout, *definitions)
    apply(layout, *(each for each in objects if each not in definitions))
    _wait(layout)


def _wait(layout: Layout) -> None:
    """Wait until the Deployment is rolled out and the webhooks answer."""
    kubectl(
        layout,
        "rollout",
        "status",
        f"deployment/{_DEPLOYMENT}",
        f"--namespace={NAMESPACE}",
        "--timeout=170s",
        limit=180,
    )
    wait_until("Kueue's webhooks", lambda: _unanswered(layout), limit=120, interval=1)


def remove(layout: Layout) -> None:
    """Delete Kueue with its objects. RayClusters that it has suspended stay suspended."""
    if kubectl_succeeds(layout, "get", "crd", "workloads.kueue.x-k8s.io"):
        # Their finalizers need the controller.
        kubectl(layout, "delete", _OWN_KINDS, "--all", "--all-namespaces", "--timeout=60s", limit=120)
    manifest = yaml.safe_dump_all(_objects(layout))
    kubectl(layout, "delete", "--ignore-not-found", "--filename=-", "--timeout=150s", stdin=manifest, limit=180)


@contextmanager
def installed(layout: Layout) -> Iterator[None]:
    """Install Kueue, and remove it at the end."""
    try:
        install(layout)
        yield
    finally:
        remove(layout)


@contextmanager
def configured(layout: Layout, **settings: Any) -> Iterator[None]:
    """Give the installed Kueue other settings in its configuration file, and restore it at the end."""
    try:
        _configure(layout, settings)
        yield
    finally:
        _configure(layout, {})


def _configure(layout: Layout, settings: Mapping[str, Any]) -> None:
    """Write the configuration file with these settings, and restart Kueue if that changes its Deployment."""
    objects = {(each["kind"], each["metadata"]["name"]): each for each in _objects(layout)}
    config, deployment = objects["ConfigMap", _CONFIG_MAP], objects["Deployment", _DEPLOYMENT]
    text = yaml.safe_dump({**yaml.safe_load(config["data"][_CONFIG_FILE]), **settings}, sort_keys=True)
    config["data"][_CONFIG_FILE] = text
    _with_image(deployment, ensure_static_image(layout, binaries.KUEUE.name, path=_PROGRAM))
    metadata = deployment["spec"]["template"]["metadata"]
    # A pod reads the file when it starts.
    metadata["annotations"] = {
        **metadata.get("annotations", {}),
        "ppojob.dev/config": hashlib.sha256(text.encode()).hexdigest()[:16],
    }
    apply(layout, config, deployment)
    _wait(layout)


def _objects(layout: Layout) -> list[dict[str, Any]]:
    """Return the manifests of the Go module."""
    folder = binaries.upstream_folder(binaries.KUEUE) / "config" / "default"
    return [each for each in yaml.safe_load_all(kubectl(layout, "kustomize", str(folder))) if each]


def _with_image(manifest: dict[str, Any], image: str) -> dict[str, Any]:
    """Return the manifest; the manager's Deployment gets our image and small requests."""
    if manifest["kind"] == "Deployment" and manifest["metadata"]["name"] == _DEPLOYMENT:
        [container] = manifest["spec"]["template"]["spec"]["containers"]
        container |= {"image": image, "imagePullPolicy": "IfNotPresent"}
        container["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}
    return manifest


def _unanswered(layout: Layout) -> str:
    """Return the unmet condition while Kueue's webhook does not answer; empty: it answers."""
    flavor = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "ResourceFlavor", "metadata": {"name": "webhook-check"}}
    is_taken = kubectl_succeeds(
        layout, "create", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump(flavor), limit=20
    )
    return "" if is_taken else "an answer from its webhook"
