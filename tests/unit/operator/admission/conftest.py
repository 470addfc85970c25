"""A cluster that knows some objects, and reviews as the API server sends them."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ppojob_operator.reconcile.acceptance import Reference
from tests.unit.operator.reconcile.worlds import spec

CLAIM = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteMany"]}}


class FakeCluster:
    """ReferencePort and TrustPort in memory; `errors` are raised one by one by whatever is asked."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Mapping[str, Any]] = {}
        self.asked: list[str] = []
        self.webhooks: dict[str, str] | None = {}
        self.trusted: list[list[str]] = []
        self.errors: list[Exception] = []
        self.before: Callable[[], Any] | None = None

    async def read_reference(self, reference: Reference, namespace: str) -> Mapping[str, Any] | None:
        self.asked.append(f"{reference.kind.value} {reference.name}")
        if self.before:
            await self.before()
        self._fail()
        return self.objects.get((reference.kind.value, namespace, reference.name))

    async def read_webhooks(self, configuration: str) -> dict[str, str] | None:
        self._fail()
        return self.webhooks

    async def trust(self, configuration: str, webhooks: list[str], ca_bundle: str) -> None:
        self._fail()
        self.trusted.append(webhooks)
        self.webhooks = dict.fromkeys(webhooks, ca_bundle)

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def cluster() -> FakeCluster:
    """A cluster with the claim that a good job names."""
    fake = FakeCluster()
    fake.objects["PersistentVolumeClaim", "rl-team", "data"] = CLAIM
    return fake


def job(raw: Any = None, status: Mapping[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    """Return a PPOJob as the API server has it."""
    named = {"namespace": "rl-team", "name": "arithmetic", "uid": "uid-1", "generation": 1, **metadata}
    return {
        "apiVersion": "ppojob.dev/v1alpha1",
        "kind": "PPOJob",
        "metadata": named,
        "spec": spec() if raw is None else raw,
        "status": dict(status or {}),
    }


def review(new: Any, old: Any = None, **changes: Any) -> dict[str, Any]:
    """Return the AdmissionReview about an object that is to be stored."""
    request = {
        "uid": "review-1",
        "kind": {"group": "ppojob.dev", "version": "v1alpha1", "kind": "PPOJob"},
        "resource": {"group": "ppojob.dev", "version": "v1alpha1", "resource": "ppojobs"},
        "operation": "CREATE" if old is None else "UPDATE",
        "namespace": "rl-team",
        "name": "arithmetic",
        "userInfo": {"username": "jane"},
        "object": new,
        "oldObject": old,
        "dryRun": False,
        **changes,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
