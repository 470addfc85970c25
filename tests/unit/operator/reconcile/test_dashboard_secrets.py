"""The Secret of a RayCluster is deleted with it, whatever the reason."""

from collections.abc import Callable

import pytest

from ppojob_api.v1alpha1.constants import Phase, Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Ray
from tests.unit.operator.reconcile.worlds import World, first_cluster


def secrets_of(world: World) -> set[str]:
    return {naming.dashboard_secret_name(cluster.name) for cluster in world.observed.clusters}


def delete_cluster(world: World) -> None:
    """Delete the RayCluster by hand."""
    world.see(clusters=(), pods=(), ray=None).settle()


def lose_trainer(world: World) -> None:
    world.trainer_fails(Reason.TRAINER_FAILED, FailureKind.INFRASTRUCTURE).settle()


def edit_pools(world: World) -> None:
    cpu = {"cpu": str(world.generation + 1)}
    pools = [{**pool, "resourcesPerGPU": cpu} for pool in world.spec["pools"]]
    world.edit(pools=pools).settle().trainer_stops_gracefully().settle()


def suspend(world: World) -> None:
    world.suspend().settle().trainer_stops_gracefully().settle()
    assert world.secrets == set()
    world.suspend(False).settle()


@pytest.mark.parametrize("replace", [delete_cluster, lose_trainer, edit_pools, suspend])
def test_three_replaced_clusters_leave_one_secret(replace: Callable[[World], None]) -> None:
    world = World(runPolicy={"backoffLimit": 9}).run()
    clusters = {world.cluster_name}

    for _ in range(3):
        replace(world)
        world.wait(360).settle().pods_become(ready=True).see(ray=Ray()).settle()
        world.wait(20).trainer_reports().settle()
        assert world.status["phase"] == Phase.RUNNING
        clusters.add(world.cluster_name)

    assert len(clusters) == 4
    assert world.secrets == secrets_of(world) == {naming.dashboard_secret_name(world.cluster_name)}


def test_a_cluster_that_is_re_created_under_its_name_keeps_its_secret() -> None:
    world = World().settle()

    delete_cluster(world)

    assert world.secrets == {naming.dashboard_secret_name(first_cluster())}


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_ended_job_has_none(is_deleted: bool) -> None:
    world = World(runPolicy={"backoffLimit": 0}).run()
    if is_deleted:
        world.see(clusters=(), pods=(), ray=None)
    world.wait(10).edit(runPolicy={"activeDeadlineSeconds": 1}).settle()

    assert world.status["phase"] == Phase.FAILED
    assert world.secrets == set()


def test_an_interrupted_deletion_is_repeated() -> None:
    world = World(runPolicy={"backoffLimit": 9}).run()
    before = set(world.secrets)
    world.trainer_fails(Reason.TRAINER_FAILED, FailureKind.INFRASTRUCTURE)
    clusters, pods = world.observed.clusters, world.observed.pods
    world.look()
    # The operator ended after it had written the status.
    world.secrets |= before
    world.see(clusters=clusters, pods=pods).settle()

    assert not world.secrets & before
