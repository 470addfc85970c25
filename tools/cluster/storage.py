"""ReadWriteMany storage on one node: a folder of the state, offered as a PersistentVolume and claimed in a namespace.

Called by the demo and the end-to-end tests. `down` removes the folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.cluster.kubernetes import apply, kubectl
from tools.cluster.layout import Layout

STORAGE_CLASS = "ppojob-folder"


def ensure_claim(layout: Layout, *, namespace: str, name: str = "ppojob-data", size: str = "50Gi") -> Path:
    """Make the claim `name` in the namespace, bound to a separate folder; return that folder on the host."""
    folder = layout.storage / namespace / name
    folder.mkdir(parents=True, exist_ok=True)
    # The pods run as other users, and fsGroup has no effect on a hostPath volume.
    folder.chmod(0o777)
    volume = f"{namespace}-{name}"
    access = {"accessModes": ["ReadWriteMany"], "storageClassName": STORAGE_CLASS}
    apply(
        layout,
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **access,
                "capacity": {"storage": size},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder), "type": "Directory"},
                "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": name},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {**access, "volumeName": volume, "resources": {"requests": {"storage": size}}},
        },
    )
    return folder


def release(layout: Layout, *, namespace: str) -> None:
    """Delete the namespace's volumes and their folders; the claims go with their namespace."""
    folder = layout.storage / namespace
    volumes = [f"{namespace}-{claim.name}" for claim in folder.iterdir()] if folder.is_dir() else []
    if volumes:
        kubectl(layout, "delete", "persistentvolume", *volumes, "--ignore-not-found", "--wait=false")
    shutil.rmtree(folder, ignore_errors=True)
