"""What is wrong with a job is said where a person looks: in its conditions, with the name and the remedy.

Every job here is applied at the start, because most of their time is waiting; none may disturb the others.
"""

from typing import Any

import pytest

from tests.e2e.conftest import Site

pytestmark = pytest.mark.timeout(1800)

PATIENCE_SECONDS = 600.0
_ONE_POOL: dict[str, Any] = {
    "pools": [{"name": "all", "gpusPerNode": 1, "resourcesPerGPU": {"cpu": "100m", "memory": "4Gi", "shm": "256Mi"}}],
    "placement": None,
    "head": {"resources": {"cpu": "100m", "memory": "2560Mi"}},
}
_UNREADABLE_DATA = {"train": {"reasoningGym": None, "files": {"paths": ["/data/none.parquet"]}}}

FAILING: dict[str, tuple[dict[str, Any], str, str]] = {
    "no-model": ({"model": {"actor": {"path": "/data/models/none"}}}, "ModelNotFound", "/data/models/none"),
    "no-data": ({"data": _UNREADABLE_DATA}, "DataUnreadable", "/data/none.parquet"),
    "no-reward": ({"reward": {"function": {"module": "no.such.reward"}}}, "RewardImportFailed", "no.such.reward"),
}


@pytest.fixture(scope="module")
def applied(site: Site) -> Site:
    """All bad jobs, applied."""
    claim = {"storage": {"claimName": "not-there", "mountPath": "/data"}}
    site.apply("no-claim", _ONE_POOL | claim)
    greedy = {**_ONE_POOL["pools"][0], "gpuResourceName": "nvidia.com/gpu", "gpusPerNode": 64}
    greedy["resourcesPerGPU"] = {"cpu": "1m", "memory": "1Mi", "shm": "1Mi"}
    site.apply("too-many-gpus", _ONE_POOL | {"pools": [greedy]})
    site.apply("no-image", _ONE_POOL | {"image": "localhost:5000/ppojob/no-such-image:1"})
    return site


def test_a_claim_that_does_not_exist_is_named(applied: Site) -> None:
    condition = applied.await_condition(
        "no-claim", "Accepted", "False", limit=PATIENCE_SECONDS, reason="StorageMissing"
    )

    assert "not-there" in condition["message"]
    assert applied.get("rayclusters", "--selector=ppojob.dev/job=no-claim")["items"] == []


def test_more_gpus_than_any_node_has_is_said_in_the_schedulers_words(applied: Site) -> None:
    condition = applied.await_condition(
        "too-many-gpus", "PoolsReady", "False", limit=PATIENCE_SECONDS, reason="InsufficientGPUs"
    )

    assert "pool all requests 64 nvidia.com/gpu per node" in condition["message"]
    assert "Insufficient nvidia.com/gpu" in condition["message"]
    applied.delete("too-many-gpus")


def test_an_image_that_cannot_be_pulled_is_said_in_the_kubelets_words(applied: Site) -> None:
    condition = applied.await_condition(
        "no-image", "PoolsReady", "False", limit=PATIENCE_SECONDS, reason="ImagePullFailed"
    )

    assert "localhost:5000/ppojob/no-such-image:1" in condition["message"]
    applied.delete("no-image")


@pytest.mark.parametrize(
    "name", ["no-model", *(pytest.param(name, marks=pytest.mark.long) for name in FAILING if name != "no-model")]
)
def test_what_only_the_container_can_see_fails_the_job_by_name(applied: Site, name: str) -> None:
    changes, reason, shown = FAILING[name]
    applied.apply(name, _ONE_POOL | changes)

    condition = applied.await_condition(name, "Failed", "True", limit=PATIENCE_SECONDS)

    failure = applied.job(name)["status"]["lastFailure"]
    assert (condition["reason"], failure["reason"]) == (reason, reason)
    assert shown in failure["message"]
    assert shown in failure["logTail"]
    # Trying again could not help, so nothing was tried again, and the cluster is released.
    assert applied.job(name)["status"]["retries"]["total"] == 0
    described = applied.kubectl("describe", "ppojob", name)
    assert reason in described
    assert shown in described
    applied.delete(name)
