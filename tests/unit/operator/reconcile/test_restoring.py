"""A RayCluster that somebody edited gets back what the job's layout says, and an Event says what was changed."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Reason
from tests.unit.operator.reconcile.worlds import World

Edit = Callable[[dict[str, Any]], Any]
ACTOR = "spec.workerGroupSpecs[actor]"


def actor(spec: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = spec["workerGroupSpecs"][0]
    return group


def head(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    return found


def container(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = actor(spec)["template"]["spec"]["containers"][0]
    return found


def edited(world: World, edit: Edit, generation: int = 2) -> World:
    """Let somebody change the RayCluster's spec behind the operator's back."""
    spec = deepcopy(dict(world.made[-1]["spec"]))
    edit(spec)
    [cluster] = world.observed.clusters
    return world.see(clusters=(replace(cluster, spec=spec, generation=generation),))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda spec: actor(spec).update(replicas=3), f"{ACTOR}.replicas was 3 in place of 1"),
        (lambda spec: actor(spec).update(maxReplicas=9), f"{ACTOR}.maxReplicas was 9 in place of 1"),
        (
            lambda spec: head(spec)["resources"]["limits"].update(memory="1Gi"),
            "spec.headGroupSpec.template.spec.containers[ray-head].resources.limits.memory was 1073741824 in place of",
        ),
        (
            lambda spec: container(spec).update(image="other:2"),
            f"{ACTOR}.template.spec.containers[ray-worker].image was other:2 in place of trainer:1",
        ),
        (
            lambda spec: spec["workerGroupSpecs"].pop(),
            "spec.workerGroupSpecs[critic].replicas was nothing in place of 1",
        ),
        (
            lambda spec: spec["workerGroupSpecs"].append({"groupName": "more", "replicas": 5}),
            "spec.workerGroupSpecs[more] was added",
        ),
        (
            lambda spec: spec.update(enableInTreeAutoscaling=True),
            "spec.enableInTreeAutoscaling was True in place of False",
        ),
    ],
    ids=["replicas", "maximum", "head's memory", "image", "group lost", "group added", "autoscaler"],
)
def test_an_edit_is_undone_and_told(edit: Edit, words: str) -> None:
    world = edited(World().run(), edit)

    plan = world.plan()

    assert [manifest["kind"] for manifest in plan.apply] == ["RayCluster"]
    assert plan.apply[0] == world.made[-1]
    [event] = [event for event in plan.events if event.reason == Reason.CLUSTER_RESTORED]
    assert words in event.message
    assert event.is_warning


@pytest.mark.parametrize(
    "edit",
    [
        lambda spec: None,
        lambda spec: spec.update(suspend=False),
        lambda spec: actor(spec)["template"]["spec"].update(nodeSelector={"flavor": "h200"}),
        lambda spec: actor(spec)["template"]["spec"].update(tolerations=[{"key": "gpu"}]),
        lambda spec: head(spec)["resources"]["limits"].update({"ephemeral-storage": "1Gi"}),
        lambda spec: head(spec)["resources"]["requests"].update(cpu="2000m"),
        lambda spec: spec["headGroupSpec"]["template"]["spec"]["containers"].append({"name": "proxy", "image": "p"}),
    ],
    ids=["nothing", "set free", "node selector", "tolerations", "another limit", "2000m for 2", "sidecar"],
)
def test_what_is_added_or_only_written_otherwise_is_left_alone(edit: Edit) -> None:
    plan = edited(World().run(), edit).plan()

    assert plan.apply == ()
    assert Reason.CLUSTER_RESTORED not in [event.reason for event in plan.events]


def test_a_spec_that_was_written_once_is_not_compared() -> None:
    # A newer operator may want another RayCluster; one that nobody touched goes on as it was made.
    plan = edited(World().run(), lambda spec: actor(spec).update(replicas=3), generation=1).plan()

    assert plan.apply == ()


def test_in_a_queue_what_kueue_let_in_is_left_to_kueue() -> None:
    world = World(runPolicy={"queueName": "gpus"}).settle()
    edited(world, lambda spec: actor(spec).update(replicas=3))

    assert world.plan().apply == ()
