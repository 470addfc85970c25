"""A RayCluster that somebody edited gets back what the job's layout says, and an Event says what was changed."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import ANNOTATION_MADE_OF, Reason
from tests.unit.operator.reconcile.worlds import World

Edit = Callable[[dict[str, Any]], Any]
ACTOR = "spec.workerGroupSpecs[actor]"
HEAD = "spec.headGroupSpec.template.spec.containers[ray-head]"


def actor(spec: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = spec["workerGroupSpecs"][0]
    return group


def head(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    return found


def container(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = actor(spec)["template"]["spec"]["containers"][0]
    return found


def volume(spec: dict[str, Any], name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = actor(spec)["template"]["spec"]["volumes"]
    return next(each for each in found if each["name"] == name)


def tolerations(spec: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = actor(spec)["template"]["spec"]["tolerations"]
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
        (lambda spec: actor(spec).update(replicas=3), f"{ACTOR}.replicas was 3 instead of 1"),
        (lambda spec: actor(spec).update(maxReplicas=9), f"{ACTOR}.maxReplicas was 9 instead of 1"),
        (
            lambda spec: head(spec)["resources"]["limits"].update(memory="1Gi"),
            "spec.headGroupSpec.template.spec.containers[ray-head].resources.limits.memory was 1Gi instead of 8Gi",
        ),
        (
            lambda spec: container(spec).update(image="other:2"),
            f"{ACTOR}.template.spec.containers[ray-worker].image was other:2 instead of trainer:1",
        ),
        (
            lambda spec: spec["workerGroupSpecs"].pop(),
            "spec.workerGroupSpecs[critic] was removed",
        ),
        (
            lambda spec: spec["workerGroupSpecs"].append({"groupName": "more", "replicas": 5}),
            "spec.workerGroupSpecs[more] was added",
        ),
        (
            lambda spec: spec.update(enableInTreeAutoscaling=True),
            "spec.enableInTreeAutoscaling was True instead of False",
        ),
    ],
    ids=["replicas", "maximum", "head's memory", "image", "group lost", "group added", "autoscaler"],
)
def test_an_edit_is_undone_and_reported(edit: Edit, words: str) -> None:
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
        lambda spec: actor(spec)["template"]["spec"].update(tolerations=[{"key": "gpu"}, *tolerations(spec)]),
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


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda spec: spec["authOptions"].update(mode="disabled"),
            "spec.authOptions.mode was disabled instead of token",
        ),
        (lambda spec: spec.pop("authOptions"), "spec.authOptions was removed"),
        (lambda spec: head(spec)["env"].clear(), f"{HEAD}.env[RAY_USAGE_STATS_ENABLED] was removed"),
        (
            lambda spec: head(spec)["securityContext"].update(allowPrivilegeEscalation=True),
            f"{HEAD}.securityContext.allowPrivilegeEscalation was True instead of False",
        ),
        (
            lambda spec: head(spec)["securityContext"].pop("allowPrivilegeEscalation"),
            f"{HEAD}.securityContext.allowPrivilegeEscalation was removed",
        ),
        (
            lambda spec: container(spec)["securityContext"]["capabilities"].update(drop=[]),
            f"{ACTOR}.template.spec.containers[ray-worker].securityContext.capabilities.drop was []",
        ),
        (
            lambda spec: actor(spec)["template"]["spec"].update(serviceAccountName="admin"),
            f"{ACTOR}.template.spec.serviceAccountName was admin instead of arithmetic-trainer",
        ),
        (lambda spec: tolerations(spec).pop(), f"{ACTOR}.template.spec.tolerations[1]"),
        (lambda spec: head(spec).pop("lifecycle"), f"{HEAD}.lifecycle was removed"),
        (
            lambda spec: volume(spec, "storage").update(persistentVolumeClaim={"claimName": "other"}),
            f"{ACTOR}.template.spec.volumes[storage].persistentVolumeClaim.claimName was other instead of data",
        ),
        (
            lambda spec: volume(spec, "shared-memory")["emptyDir"].update(sizeLimit="1Mi"),
            f"{ACTOR}.template.spec.volumes[shared-memory].emptyDir.sizeLimit was 1Mi instead of",
        ),
        (
            lambda spec: actor(spec)["rayStartParams"].update({"num-gpus": "0"}),
            f"{ACTOR}.rayStartParams.num-gpus was 0 instead of 2",
        ),
    ],
)
def test_no_field_that_the_operator_sets_can_be_edited(edit: Edit, words: str) -> None:
    world = edited(World().run(), edit)

    plan = world.plan()

    assert plan.apply == (world.made[-1],)
    [event] = [event for event in plan.events if event.reason == Reason.CLUSTER_RESTORED]
    assert words in event.message


def test_an_event_names_a_variable_and_not_what_it_holds() -> None:
    world = World(env=[{"name": "WANDB_API_KEY", "value": "hunter22"}]).run()
    edited(world, lambda spec: head(spec)["env"][-1].update(value="swordfish"))

    [event] = [event for event in world.plan().events if event.reason == Reason.CLUSTER_RESTORED]

    assert event.message.endswith(f"{HEAD}.env[WANDB_API_KEY].value was changed")


USERS = {
    "spec": {
        "containers": [
            {
                "name": "ray-head",
                "env": [{"name": "EMPTY", "value": ""}],
                "ports": [
                    {"name": "syslog", "containerPort": 514, "protocol": "UDP"},
                    {"name": "syslog-tcp", "containerPort": 514, "protocol": "TCP"},
                ],
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch", "readOnly": False}],
            },
            {
                "name": "proxy",
                "image": "proxy:1",
                "args": [],
                "resources": {"requests": {"cpu": "0.5", "memory": "1.5Gi"}, "limits": {}},
            },
        ],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "hostPID": False,
    }
}


def as_a_client_writes_it(value: Any, name: str = "") -> Any:
    """Return an object as a typed client of Kubernetes stores it: no empty values, and quantities in its own way."""
    pointers = {"allowPrivilegeEscalation", "automountServiceAccountToken", "enableServiceLinks", "emptyDir"}
    if isinstance(value, dict):
        kept = {each: as_a_client_writes_it(item, each) for each, item in value.items()}
        return {each: item for each, item in kept.items() if item not in ("", 0, [], {}) or each in pointers}
    if isinstance(value, list):
        return [as_a_client_writes_it(item) for item in value]
    return {"0.5": "500m", "1.5Gi": "1536Mi", "1024Mi": "1Gi", "2560Mi": "2560Mi"}.get(value, value)


def test_a_cluster_that_another_client_has_written_is_not_an_edited_one() -> None:
    world = World(head={"podTemplate": USERS}).run()
    [cluster] = world.observed.clusters
    spec = as_a_client_writes_it(deepcopy(dict(world.made[-1]["spec"])))
    spec["headGroupSpec"]["template"]["metadata"]["creationTimestamp"] = None

    world.see(clusters=(replace(cluster, spec=spec, generation=2),))

    assert world.plan().apply == ()


def test_in_a_queue_what_kueue_adds_is_left_to_kueue_and_an_edit_is_undone() -> None:
    def lets_in(spec: dict[str, Any]) -> None:
        spec["suspend"] = False
        template = actor(spec)["template"]
        template["metadata"]["labels"]["kueue.x-k8s.io/podset"] = "actor"
        template["spec"] |= {"nodeSelector": {"flavor": "h200"}, "schedulingGates": [{"name": "topology"}]}
        template["spec"]["tolerations"].append({"key": "spot", "operator": "Exists"})

    world = World(runPolicy={"queueName": "gpus"}).settle()
    created_from = world.made[-1]["metadata"]["annotations"][ANNOTATION_MADE_OF]
    edited(world, lets_in)
    [cluster] = world.observed.clusters
    world.see(clusters=(replace(cluster, created_from=created_from),))
    assert world.plan().apply == ()

    [cluster] = world.observed.clusters
    spec = {**cluster.spec, "authOptions": {"mode": "disabled"}}
    world.see(clusters=(replace(cluster, spec=spec),))
    assert world.plan().apply == (world.made[-1],)

    # As an older operator made it, or before runPolicy was edited: Kueue would evict it for the difference.
    world.see(clusters=(replace(cluster, spec=spec, created_from="other"),))
    assert world.plan().apply == ()


def test_in_the_default_queue_what_kueue_adds_is_left_to_kueue_and_an_edit_is_undone() -> None:
    world = World()
    world.default_queue = "default"
    world.settle()
    [created] = world.made
    [cluster] = world.observed.clusters
    spec = {**created["spec"], "suspend": False}
    world.see(clusters=(replace(cluster, spec=spec, generation=2),))
    assert world.settle().plan().apply == ()

    world.see(clusters=(replace(cluster, spec={**spec, "authOptions": {"mode": "disabled"}}, generation=2),))
    [restored] = world.plan().apply
    assert restored["spec"] == created["spec"]
    assert restored["metadata"]["annotations"] == created["metadata"]["annotations"]

    world.see(clusters=(replace(cluster, spec=spec, generation=2, created_from="of an older operator"),))
    assert world.plan().apply == ()
