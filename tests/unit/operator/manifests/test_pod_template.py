"""A user's pod template is merged by name, or refused where it would break Ray."""

from collections.abc import Callable
from typing import Any

import pytest

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests.ray_cluster import ray_cluster, template_problems
from ppojob_operator.plan import JobKey

KEY, UID = JobKey("ns", "job"), "uid-1"
MakeSpec = Callable[..., PPOJobSpec]


@pytest.fixture
def with_template(make_spec: MakeSpec) -> Callable[[dict[str, Any]], PPOJobSpec]:
    """Return a maker of specs with one pool that has this template."""

    def make(template: dict[str, Any]) -> PPOJobSpec:
        pools = [{"name": "actor", "gpusPerNode": 2, "podTemplate": template}]
        return make_spec(pools=pools, placement={"actor": "actor"})

    return make


WithTemplate = Callable[[dict[str, Any]], PPOJobSpec]


def pod(spec: PPOJobSpec) -> dict[str, Any]:
    """Return the pod template of the pool."""
    assert list(template_problems(spec, KEY, UID)) == []
    found: dict[str, Any] = ray_cluster(spec, KEY, UID, "c")["spec"]["workerGroupSpecs"][0]["template"]
    return found


def test_labels_and_annotations_are_added(with_template: WithTemplate) -> None:
    found = pod(with_template({"metadata": {"labels": {"team": "rl"}, "annotations": {"note": "x"}}}))

    assert found["metadata"]["labels"]["team"] == "rl"
    assert found["metadata"]["labels"]["ppojob.dev/pool"] == "actor"
    assert found["metadata"]["annotations"] == {"note": "x"}


def test_the_ray_container_is_changed_by_its_name(with_template: WithTemplate) -> None:
    change = {
        "name": "ray-worker",
        "imagePullPolicy": "Always",
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    }
    found = pod(with_template({"spec": {"containers": [change]}}))["spec"]["containers"]

    (ray,) = found
    assert ray["imagePullPolicy"] == "Always"
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in ray["env"]
    assert len(ray["volumeMounts"]) == 4
    assert ray["image"] == "trainer:1"
    assert ray["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_capabilities_are_added_to_that_of_rdma(make_spec: MakeSpec) -> None:
    change = {"name": "ray-worker", "securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}
    network = {"rdma": {"resourceName": "rdma/hca"}}
    pools = [{"name": "actor", "gpusPerNode": 2, "network": network, "podTemplate": {"spec": {"containers": [change]}}}]
    (ray,) = pod(make_spec(pools=pools, placement={"actor": "actor"}))["spec"]["containers"]

    assert ray["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK", "SYS_PTRACE"]}


def test_another_container_comes_after_rays(with_template: WithTemplate) -> None:
    found = pod(with_template({"spec": {"containers": [{"name": "sidecar", "image": "x"}]}}))["spec"]["containers"]

    assert [container["name"] for container in found] == ["ray-worker", "sidecar"]


def test_tolerations_are_added_and_other_lists_replaced(with_template: WithTemplate) -> None:
    template = {"spec": {"tolerations": [{"key": "a"}], "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["x"]}]}}
    found = pod(with_template(template))["spec"]

    assert {"key": "a"} in found["tolerations"]
    assert len(found["tolerations"]) == 3
    assert len(found["hostAliases"]) == 1


def test_single_values_are_the_users(with_template: WithTemplate) -> None:
    found = pod(with_template({"spec": {"priorityClassName": "high", "securityContext": {"runAsUser": 5}}}))["spec"]

    assert found["priorityClassName"] == "high"
    assert found["securityContext"]["runAsUser"] == 5
    assert found["securityContext"]["runAsNonRoot"] is True


def test_terms_of_affinity_stand_beside_that_of_spread(make_spec: MakeSpec) -> None:
    term = {"labelSelector": {"matchLabels": {"noisy": "yes"}}, "topologyKey": "kubernetes.io/hostname"}
    zones = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = {"podAntiAffinity": {required: [term]}, "nodeAffinity": {required: zones}}
    template = {"spec": {"affinity": affinity}}
    pools = [{"name": "actor", "nodes": 2, "gpusPerNode": 2, "spread": "Required", "podTemplate": template}]
    found = pod(make_spec(pools=pools, placement={"actor": "actor"}))["spec"]["affinity"]

    ours, theirs = found["podAntiAffinity"][required]
    assert ours["labelSelector"]["matchLabels"] == {"ray.io/cluster": "c", "ppojob.dev/pool": "actor"}
    assert theirs == term
    assert found["nodeAffinity"] == {required: zones}


def test_a_constraint_of_the_users_over_zones_is_added_to_ours_over_hosts(make_spec: MakeSpec) -> None:
    zones = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    template = {"spec": {"topologySpreadConstraints": [zones]}}
    pools = [{"name": "actor", "nodes": 2, "gpusPerNode": 2, "podTemplate": template}]
    found = pod(make_spec(pools=pools, placement={"actor": "actor"}))["spec"]["topologySpreadConstraints"]

    assert [each["topologyKey"] for each in found] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


@pytest.mark.parametrize(
    "fields",
    [
        {"priorityClassName": "high"},
        {"runtimeClassName": "nvidia"},
        {"schedulerName": "volcano"},
        {"initContainers": [{"name": "warm", "image": "x", "restartPolicy": "Always"}]},
        {"resourceClaims": [{"name": "nic", "resourceClaimName": "shared"}]},
        {"hostAliases": [{"ip": "1.2.3.4", "hostnames": ["x"]}]},
        {"terminationGracePeriodSeconds": 630},
        {"terminationGracePeriodSeconds": 3600},
    ],
)
def test_settings_without_a_field_are_passed_on_unchanged(with_template: WithTemplate, fields: dict[str, Any]) -> None:
    found = pod(with_template({"spec": fields}))["spec"]

    assert {name: found[name] for name in fields} == fields


def test_a_volume_of_the_users_is_mounted_beside_ours(with_template: WithTemplate) -> None:
    container = {"name": "ray-worker", "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]}
    volume = {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}
    found = pod(with_template({"spec": {"containers": [container], "volumes": [volume]}}))["spec"]

    assert volume in found["volumes"]
    assert found["containers"][0]["volumeMounts"][-1] == {"name": "cache", "mountPath": "/cache"}


def test_a_claim_of_the_users_may_not_take_the_name_of_one_of_the_pool(make_spec: MakeSpec) -> None:
    claims = [{"name": "gpus", "resourceClaimTemplateName": "two-h200"}]
    template = {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimName": "x"}]}}
    pool = {"name": "actor", "gpusPerNode": 2, "gpuResourceName": "", "resourceClaims": claims, "podTemplate": template}

    (problem,) = template_problems(make_spec(pools=[pool], placement={"actor": "actor"}), KEY, UID)

    assert problem.path == "spec.pools[0].podTemplate.spec.resourceClaims[0].name"


def ray_container(**fields: Any) -> dict[str, Any]:
    """Return a template that changes Ray's container."""
    return {"spec": {"containers": [{"name": "ray-worker", **fields}]}}


@pytest.mark.parametrize(
    ("template", "path", "words"),
    [
        ({"kind": "Pod"}, "kind", "metadata and spec only"),
        ({"spec": []}, "spec", "must be an object"),
        (
            {"spec": {"containers": [{"name": "ray-worker", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}]}},
            "spec.containers[0].lifecycle.preStop",
            "run yours in a separate container",
        ),
        ({"metadata": {"name": "x"}}, "metadata.name", "only labels and annotations"),
        ({"metadata": {"labels": {"ray.io/cluster": "x"}}}, "metadata.labels.ray.io/cluster", "choose another"),
        ({"metadata": {"labels": {"ppojob.dev/job": "x"}}}, "metadata.labels.ppojob.dev/job", "choose another"),
        (
            {"metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"}}},
            "metadata.annotations.kueue.x-k8s.io/podset-required-topology",
            "use topology of the pool",
        ),
        (
            {"metadata": {"annotations": {"ray.io/overwrite-container-cmd": "true"}}},
            "metadata.annotations.ray.io/overwrite-container-cmd",
            "choose another",
        ),
        ({"spec": {"hostNetwork": True}}, "spec.hostNetwork", "network.hostNetwork"),
        ({"spec": {"hostPID": True}}, "spec.hostPID", "must not see the processes"),
        ({"spec": {"hostIPC": True}}, "spec.hostIPC", "must not share memory with the node"),
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy", "replaced instead of restarted"),
        ({"spec": {"serviceAccountName": "x"}}, "spec.serviceAccountName", "use spec.serviceAccountName"),
        ({"spec": {"automountServiceAccountToken": True}}, "spec.automountServiceAccountToken", "no credentials"),
        ({"spec": {"volumes": [{"name": "storage"}]}}, "spec.volumes[0].name", "choose another"),
        ({"spec": {"volumes": [{}]}}, "spec.volumes[0]", "each item needs name"),
        ({"spec": {"containers": {"name": "x"}}}, "spec.containers", "must be a list"),
        ({"spec": {"containers": ["x"]}}, "spec.containers[0]", "each item needs name"),
        (ray_container(command=["sh"]), "spec.containers[0].command", "KubeRay starts Ray"),
        (ray_container(args=["x"]), "spec.containers[0].args", "KubeRay starts Ray"),
        (ray_container(resources={}), "spec.containers[0].resources", "resourcesPerGPU"),
        (ray_container(env=[{"name": "RAY_ADDRESS"}]), "spec.containers[0].env[0].name", "choose another"),
        (
            ray_container(volumeMounts=[{"name": "x", "mountPath": "/data"}]),
            "spec.containers[0].volumeMounts[0].mountPath",
            "choose another path",
        ),
        (ray_container(volumeMounts=[{"name": "x"}]), "spec.containers[0].volumeMounts[0]", "needs mountPath"),
    ],
)
def test_what_would_break_ray_is_refused_with_its_path(
    with_template: WithTemplate, template: dict[str, Any], path: str, words: str
) -> None:
    problems = list(template_problems(with_template(template), KEY, UID))

    assert [problem.path for problem in problems] == [f"spec.pools[0].podTemplate.{path}"]
    assert words in problems[0].message


@pytest.mark.parametrize(
    "given", ["/data/", "//data", "/data//", "/data/.", "/./data", "/data/x/..", "data", "/dev//shm/", "/etc/ppojob/"]
)
def test_every_spelling_of_a_folder_that_the_operator_mounts_is_refused(
    with_template: WithTemplate, given: str
) -> None:
    [problem] = template_problems(
        with_template(ray_container(volumeMounts=[{"name": "x", "mountPath": given}])), KEY, UID
    )

    path = "spec.pools[0].podTemplate.spec.containers[0].volumeMounts[0].mountPath"
    assert str(problem) == f"{path}: {given!r}: the operator mounts a volume there: choose another path"


@pytest.mark.parametrize("storage", ["/data/", "//data", "/data/."])
def test_every_spelling_of_the_storages_folder_is_its_folder(make_spec: MakeSpec, storage: str) -> None:
    pool = {"name": "actor", "gpusPerNode": 2, "podTemplate": ray_container(volumeMounts=[{"mountPath": "/data"}])}
    given = {"claimName": "data", "mountPath": storage}
    spec = make_spec(pools=[pool], placement={"actor": "actor"}, storage=given)

    [problem] = template_problems(spec, KEY, UID)

    assert "the operator mounts a volume there" in str(problem)


@pytest.mark.parametrize("given", ["/data/cache", "/database", "/data/../cache"])
def test_a_folder_beside_or_below_ours_is_the_users(with_template: WithTemplate, given: str) -> None:
    mount = {"name": "cache", "mountPath": given}

    assert mount in pod(with_template(ray_container(volumeMounts=[mount])))["spec"]["containers"][0]["volumeMounts"]


def test_the_heads_template_is_checked_too(make_spec: MakeSpec) -> None:
    spec = make_spec(head={"podTemplate": {"spec": {"containers": [{"name": "ray-head", "command": ["x"]}]}}})

    (problem,) = template_problems(spec, KEY, UID)

    assert problem.path == "spec.head.podTemplate.spec.containers[0].command"


@pytest.mark.parametrize("given", [0, 30, 629, "3600"])
def test_a_grace_period_that_cuts_the_checkpoint_short_is_refused(with_template: WithTemplate, given: object) -> None:
    spec = with_template({"spec": {"terminationGracePeriodSeconds": given}})

    [problem] = template_problems(spec, KEY, UID)

    path = "spec.pools[0].podTemplate.spec.terminationGracePeriodSeconds"
    remedy = "spec.runPolicy.stopGracePeriodSeconds needs 630 or more: lower it, or remove this field"
    assert str(problem) == f"{path}: {given!r}: {remedy}"


def test_a_head_with_too_short_a_grace_period_is_refused_too(make_spec: MakeSpec) -> None:
    head = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 30}}}

    [problem] = template_problems(make_spec(head=head, runPolicy={"stopGracePeriodSeconds": 10}), KEY, UID)

    assert str(problem).startswith("spec.head.podTemplate.spec.terminationGracePeriodSeconds: 30: ")
    assert "needs 40 or more" in str(problem)


@pytest.mark.parametrize("key", [["a"], {"a": "b"}, None, 5, True])
@pytest.mark.parametrize(
    ("path", "name", "field"),
    [
        ("spec", "volumes", "name"),
        ("spec", "containers", "name"),
        ("spec", "initContainers", "name"),
        ("spec", "imagePullSecrets", "name"),
        ("spec", "topologySpreadConstraints", "topologyKey"),
        ("spec", "resourceClaims", "name"),
        ("spec.containers[0]", "env", "name"),
        ("spec.containers[0]", "volumeMounts", "mountPath"),
    ],
)
def test_a_merge_key_that_is_no_string_is_refused(
    with_template: WithTemplate, path: str, name: str, field: str, key: object
) -> None:
    fields = {name: [{field: key}]}

    [problem] = template_problems(
        with_template({"spec": fields} if path == "spec" else ray_container(**fields)), KEY, UID
    )

    shown = "'null'" if key is None else repr(key)
    here = f"spec.pools[0].podTemplate.{path}.{name}[0].{field}"
    assert str(problem) == f"{here}: {shown}: must be a string, because items are merged by it"


@pytest.mark.parametrize("port", [["a"], "80", None, True, 8.5])
@pytest.mark.parametrize("container", ["ray-head", "sidecar"])
def test_a_port_that_is_no_integer_is_refused(make_spec: MakeSpec, container: str, port: object) -> None:
    template = {"spec": {"containers": [{"name": container, "ports": [{"containerPort": port}]}]}}

    [problem] = template_problems(make_spec(head={"podTemplate": template}), KEY, UID)

    assert problem.path == "spec.head.podTemplate.spec.containers[0].ports[0].containerPort"
    assert problem.message == "must be an integer, because items are merged by it"


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"metadata": None}, "metadata"),
        ({"metadata": {"labels": None}}, "metadata.labels"),
        ({"metadata": {"labels": {"ppojob.dev/pool": None}}}, "metadata.labels.ppojob.dev/pool"),
        ({"metadata": {"annotations": None}}, "metadata.annotations"),
        ({"spec": None}, "spec"),
        *(
            ({"spec": {name: None}}, f"spec.{name}")
            for name in ("affinity", "containers", "securityContext", "serviceAccountName", "tolerations", "volumes")
        ),
        *(
            (ray_container(**{name: None}), f"spec.containers[0].{name}")
            for name in ("env", "image", "lifecycle", "resources", "securityContext", "volumeMounts")
        ),
        (ray_container(lifecycle={"preStop": None}), "spec.containers[0].lifecycle.preStop"),
    ],
)
def test_null_for_a_field_of_the_operators_is_refused(make_spec: MakeSpec, template: dict[str, Any], path: str) -> None:
    topology = {"required": "example.com/rack"}
    pool = {"name": "actor", "nodes": 2, "gpusPerNode": 2, "spread": "Required", "topology": topology}
    spec = make_spec(pools=[{**pool, "podTemplate": template}], placement={"actor": "actor"})

    [problem] = template_problems(spec, KEY, UID)

    remedy = "null would remove what the trainer needs: leave the field out"
    assert str(problem) == f"spec.pools[0].podTemplate.{path}: {remedy}"


@pytest.mark.parametrize(
    ("template", "path", "words"),
    [
        ({"metadata": []}, "metadata", "must be an object"),
        ({"metadata": {"labels": []}}, "metadata.labels", "must be an object"),
        *(
            (
                {"metadata": {"annotations": value}},
                "metadata.annotations",
                "must be an object of names and strings, or leave the field out",
            )
            for value in (None, "", [])
        ),
        ({"spec": {"securityContext": []}}, "spec.securityContext", "must be an object"),
        ({"spec": {"tolerations": {}}}, "spec.tolerations", "must be a list"),
        (ray_container(lifecycle="x"), "spec.containers[0].lifecycle", "must be an object"),
        (ray_container(volumeMounts={}), "spec.containers[0].volumeMounts", "must be a list"),
    ],
)
def test_another_type_than_that_of_the_operators_field_is_refused(
    with_template: WithTemplate, template: dict[str, Any], path: str, words: str
) -> None:
    [problem] = template_problems(with_template(template), KEY, UID)

    assert problem.path == f"spec.pools[0].podTemplate.{path}"
    assert problem.message == words


@pytest.mark.parametrize("key", [["a"], {"a": "b"}, 5, None])
def test_the_key_of_a_toleration_must_be_a_string(make_spec: MakeSpec, key: object) -> None:
    pools = [{"name": "actor", "gpusPerNode": 2, "tolerations": [{"operator": "Exists"}, {"key": key}]}]
    spec = make_spec(pools=pools, placement={"actor": "actor"}, head={"tolerations": [{"key": key}]})

    problems = list(template_problems(spec, KEY, UID))

    assert [each.path for each in problems] == ["spec.head.tolerations[0].key", "spec.pools[0].tolerations[1].key"]
    assert all(each.message.startswith("must be a string: the key of a taint") for each in problems)


@pytest.mark.parametrize(
    ("secret", "path"),
    [
        ({}, "spec.imagePullSecrets[0]"),
        ({"name": ["a"]}, "spec.imagePullSecrets[0].name"),
        ({"name": None}, "spec.imagePullSecrets[0].name"),
    ],
)
def test_the_name_of_a_pull_secret_must_be_a_string(make_spec: MakeSpec, secret: dict[str, Any], path: str) -> None:
    head = {"podTemplate": {"spec": {"imagePullSecrets": [{"name": "a"}]}}}

    [problem] = template_problems(make_spec(imagePullSecrets=[secret], head=head), KEY, UID)

    assert problem.path == path
