"""Pytest fixtures over the running cluster, for tests/integration and tests/e2e.

A folder's conftest.py imports what it uses: `from tools.cluster.fixtures import cluster, namespace`. They refuse to
start a cluster: `make cluster-up` does, and a missing one is a failure and not a skip.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools.cluster import kubernetes, storage
from tools.cluster.cluster import is_healthy
from tools.cluster.images import build as images
from tools.cluster.images.recipes import OPERATOR, TRAINER
from tools.cluster.layout import Layout


@dataclass(frozen=True)
class RunningCluster:
    """The healthy one-node cluster."""

    layout: Layout

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.layout.kubeconfig

    def kubectl(self, *arguments: str, limit: float = 300.0, stdin: str | None = None) -> str:
        """Run kubectl and return its output; ClusterError with its message if it fails."""
        return kubernetes.kubectl(self.layout, *arguments, limit=limit, stdin=stdin)

    def get(self, *arguments: str) -> Any:
        """`kubectl get` as parsed JSON."""
        return kubernetes.get_json(self.layout, *arguments)

    def claim_storage(self, namespace: str, name: str = "ppojob-data") -> Path:
        """Make a ReadWriteMany claim in the namespace; return its folder on the host."""
        return storage.ensure_claim(self.layout, namespace=namespace, name=name)


@pytest.fixture(scope="session")
def cluster() -> RunningCluster:
    """The running cluster."""
    layout = Layout.from_environment()
    if not is_healthy(layout):
        pytest.fail("the one-node cluster is not running; start it with: make cluster-up", pytrace=False)
    return RunningCluster(layout)


@pytest.fixture
def namespace(cluster: RunningCluster) -> Iterator[str]:
    """A namespace of the test's own, deleted after it."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")
    storage.release(cluster.layout, namespace=name)


@pytest.fixture(scope="session")
def operator_image(cluster: RunningCluster) -> str:
    """The operator's image of this working tree, in the cluster's registry."""
    return images.ensure(cluster.layout, OPERATOR).name


@pytest.fixture(scope="session")
def trainer_image(cluster: RunningCluster) -> str:
    """The trainer's image of this working tree, in the cluster's registry."""
    return images.ensure(cluster.layout, TRAINER).name
