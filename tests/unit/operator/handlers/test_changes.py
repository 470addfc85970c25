"""Which events of the watches cause a reconcile."""

import copy
from collections.abc import Hashable, Mapping
from typing import Any

import pytest

from ppojob_operator.handlers.changes import Changes, cluster_view, fetch_job_view, job_view, pod_view

JOB = {
    "metadata": {"uid": "u", "generation": 1, "resourceVersion": "1"},
    "spec": {},
    "status": {
        "phase": "Running",
        "conditions": [{"type": "Accepted", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        "progress": {"step": 1, "activity": "Training", "lastUpdateTime": "2026-01-01T00:00:00Z"},
        "pools": [{"name": "actor", "readyNodes": 1, "busyFraction": "0.9"}],
        "checkpoint": {"step": 1},
    },
}
POD = {
    "metadata": {"name": "p", "labels": {"ray.io/cluster": "c", "ppojob.dev/pool": "actor"}, "resourceVersion": "1"},
    "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]},
}
CLUSTER = {"metadata": {"name": "c"}, "status": {"state": "", "head": {"serviceName": ""}, "lastUpdateTime": "1"}}


def changed(raw: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return the object with one field changed."""
    new = copy.deepcopy(dict(raw))
    *parents, last = path.split(".")
    section: Any = new
    for part in parents:
        section = section[part]
    section[last] = value
    return new


@pytest.mark.parametrize(
    ("path", "value", "is_new"),
    [
        ("metadata.resourceVersion", "2", False),
        ("status.progress.step", 2, False),
        ("status.progress.lastUpdateTime", "2026-01-01T00:00:10Z", False),
        ("status.pools", [{"name": "actor", "busyFraction": "0.8"}], False),
        ("status.metrics", [{"name": "critic/score/mean", "value": "1"}], False),
        ("status.layoutAdvice", [{"pools": []}], False),
        ("status.phase", "Restarting", False),
        ("status.fetch", {"bytes": 2}, False),
        ("status.sources", [{"address": "hf://a/b"}], True),
        ("status.conditions", [], False),
        ("status.progress.activity", "Finished", True),
        ("status.checkpoint", {"step": 2}, True),
        ("metadata.generation", 2, True),
        ("metadata.deletionTimestamp", "2026-01-01T00:00:00Z", True),
        ("metadata.annotations", {"a": "b"}, True),
        ("metadata.uid", "another", True),
    ],
)
def test_of_a_job_the_spec_and_what_the_trainer_does_matter(path: str, value: object, is_new: bool) -> None:
    assert (job_view(changed(JOB, path, value)) != job_view(JOB)) == is_new


@pytest.mark.parametrize(
    ("path", "value", "is_new"),
    [
        ("metadata.resourceVersion", "2", False),
        ("status.phase", "Running", False),
        ("status.conditions", [{"type": "Ready", "status": "True"}], True),
        ("status.conditions", [{"type": "PodScheduled", "status": "False", "message": "no GPUs"}], True),
        ("status.podIP", "10.0.0.1", True),
        ("metadata.deletionTimestamp", "2026-01-01T00:00:00Z", True),
    ],
)
def test_of_a_pod_matters_what_the_policies_see(path: str, value: object, is_new: bool) -> None:
    assert (pod_view(changed(POD, path, value)) != pod_view(POD)) == is_new


@pytest.mark.parametrize(
    ("path", "value", "is_new"),
    [
        ("status.lastUpdateTime", "2", False),
        ("status.state", "ready", False),
        ("status.head", {"serviceName": "head"}, True),
        ("spec", {"suspend": True}, True),
        ("metadata.labels", {"kueue.x-k8s.io/queue-name": "default"}, True),
    ],
)
def test_of_a_cluster_matters_what_the_policies_see(path: str, value: object, is_new: bool) -> None:
    assert (cluster_view(changed(CLUSTER, path, value)) != cluster_view(CLUSTER)) == is_new


@pytest.mark.parametrize(
    ("path", "value", "is_new"),
    [
        ("status.active", 2, False),
        ("status.conditions", [{"type": "Complete", "status": "True"}], True),
        ("status.conditions", [{"type": "Failed", "status": "True", "message": "no"}], True),
        ("spec", {"suspend": True}, True),
        ("metadata.deletionTimestamp", "2026-01-01T00:00:00Z", True),
    ],
)
def test_of_the_job_that_fetches_matters_whether_it_has_ended(path: str, value: object, is_new: bool) -> None:
    raw = {"metadata": {"name": "products-fetch"}, "status": {"active": 1}}

    assert (fetch_job_view(changed(raw, path, value)) != fetch_job_view(raw)) == is_new


def test_only_new_views_are_reported_except_by_a_restarted_watch() -> None:
    changes = Changes()
    told: list[tuple[str | None, Hashable, bool]] = [
        ("ADDED", "a", True),
        ("MODIFIED", "a", False),
        ("MODIFIED", "b", True),
        (None, "b", True),
        ("MODIFIED", "b", False),
        ("DELETED", "b", True),
        ("ADDED", "b", True),
    ]

    assert [changes.is_new(event, "uid", view) for event, view, _ in told] == [expected for *_, expected in told]


def test_objects_are_distinguished() -> None:
    changes = Changes()

    assert changes.is_new("ADDED", "one", "a")
    assert changes.is_new("ADDED", "other", "a")


def test_a_queue_that_lets_a_cluster_in_and_an_edit_of_its_spec_are_news() -> None:
    changes = Changes()

    def is_new(**spec: object) -> bool:
        return changes.is_new("MODIFIED", "u", cluster_view({"metadata": {"name": "c"}, "spec": spec}))

    assert is_new(suspend=True)
    assert not is_new(suspend=True)
    assert is_new(suspend=False)
    assert is_new(suspend=False, workerGroupSpecs=[])
