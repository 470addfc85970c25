"""Without KubeRay the operator says so, and picks the job up when it comes: no restart, no new apply."""

from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from tests.integration.operator.hiding_proxy import HidingProxy

pytestmark = pytest.mark.usefixtures("volumes", "claim")


@pytest.fixture(scope="module")
def proxy(rights: Any) -> Iterator[HidingProxy]:
    """A connection to the API server that hides RayClusters."""
    with rights.proxy(hidden="ray.io") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def operator(rights: Any, proxy: HidingProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The operator, on that way."""
    process = rights.operator_behind(proxy, tmp_path_factory.mktemp("operator"))
    process.start()
    yield process
    assert process.stop() == 0, process.log.read_text()


def test_the_job_waits_for_kuberay_and_continues_when_it_is_installed(
    kubectl: Any, jobs: Any, proxy: HidingProxy
) -> None:
    name = jobs.create()

    message = jobs.wait_for(name, Condition.ACCEPTED, "Unknown", Reason.KUBERAY_MISSING)
    assert "install the KubeRay operator" in message
    assert kubectl.json("get", "rayclusters", "--selector", f"ppojob.dev/job={name}")["items"] == []
    assert jobs.status(name)["phase"] == "Pending"

    proxy.is_hiding = False
    jobs.wait_for(name, Condition.ACCEPTED, "True", Reason.VALID)
    jobs.wait_for(name, Condition.POOLS_READY, "False", Reason.IMAGE_PULL_FAILED, limit=240)


def test_its_clusters_are_watched_from_then_on(kubectl: Any, jobs: Any, operator: Any) -> None:
    jobs.wait_until(lambda: operator.log.read_text().count("watching PPOJobs") >= 2)

    assert operator.is_ready()
