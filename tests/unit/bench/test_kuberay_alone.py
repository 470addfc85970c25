"""What the bench creates to measure KubeRay without the operator: the operator's own objects, without an owner."""

from __future__ import annotations

from tests.bench.operator_scale.alone import objects


def test_a_job_has_its_ray_cluster_and_what_surrounds_it() -> None:
    made = objects("bench", "job-0001", 4)

    assert [each["kind"] for each in made] == ["ServiceAccount", "ConfigMap", "RayCluster"]
    assert {each["metadata"]["namespace"] for each in made} == {"bench"}
    account, _, cluster = made
    groups = cluster["spec"]["workerGroupSpecs"]
    assert [(group["groupName"], group["replicas"]) for group in groups] == [("actor", 2), ("critic", 1)]
    pods = [cluster["spec"]["headGroupSpec"], *groups]
    names = {group["template"]["spec"].get("serviceAccountName") for group in pods}
    assert account["metadata"]["name"] in names


def test_nothing_has_an_owner_that_does_not_exist() -> None:
    assert all("ownerReferences" not in each["metadata"] for each in objects("bench", "job-0001", 3))


def test_two_jobs_have_objects_of_different_names() -> None:
    first, second = (
        {(each["kind"], each["metadata"]["name"]) for each in objects("bench", name, 3)} for name in ("job-1", "job-2")
    )

    assert not first & second
