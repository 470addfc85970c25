"""The RayCluster says what the spec says, and Ray counts what the pods have."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests.quantity import times
from ppojob_operator.manifests.ray_cluster import logical_cpus, ray_cluster, template_problems
from ppojob_operator.plan import JobKey

KEY, UID = JobKey("ns", "job"), "uid-1"
MakeSpec = Callable[..., PPOJobSpec]


def cluster(spec: PPOJobSpec) -> dict[str, Any]:
    """Return the RayCluster's spec."""
    found: dict[str, Any] = ray_cluster(spec, KEY, UID, "job-12345")["spec"]
    return found


def group(spec: PPOJobSpec, index: int = 0) -> dict[str, Any]:
    """Return a worker group."""
    found: dict[str, Any] = cluster(spec)["workerGroupSpecs"][index]
    return found


def pod(spec: PPOJobSpec, index: int = 0) -> dict[str, Any]:
    """Return the pod spec of a pool."""
    found: dict[str, Any] = group(spec, index)["template"]["spec"]
    return found


def one_pool(make_spec: MakeSpec, **fields: Any) -> PPOJobSpec:
    """Return a spec with one pool."""
    return make_spec(pools=[{"name": "actor", "gpusPerNode": 2, **fields}], placement={"actor": "actor"})


def test_the_head_has_no_logical_resources_and_an_open_dashboard(make_spec: MakeSpec) -> None:
    params = cluster(make_spec())["headGroupSpec"]["rayStartParams"]

    assert params == {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"}


def test_all_pods_are_held_until_the_trainer_has_stopped_gracefully(make_spec: MakeSpec) -> None:
    spec = cluster(make_spec(runPolicy={"stopGracePeriodSeconds": 90}))

    for template in (spec["headGroupSpec"]["template"], *(each["template"] for each in spec["workerGroupSpecs"])):
        [container] = template["spec"]["containers"]
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["ppojob", "hold", "--limit", "90"]
        assert template["spec"]["terminationGracePeriodSeconds"] == 120


def test_a_pools_pod_that_waits_for_the_head_ends_at_once(make_spec: MakeSpec) -> None:
    assert pod(make_spec())["shareProcessNamespace"] is True


def test_kueue_finds_its_labels_only_where_there_is_a_queue(make_spec: MakeSpec) -> None:
    def labels(**policy: str) -> dict[str, str]:
        found: dict[str, str] = ray_cluster(make_spec(runPolicy=policy), KEY, UID, "c")["metadata"]["labels"]
        return {name: value for name, value in found.items() if "kueue" in name}

    assert labels() == {}
    assert labels(queueName="gpus") == {"kueue.x-k8s.io/queue-name": "gpus"}
    assert labels(queueName="gpus", queuePriorityClass="high") == {
        "kueue.x-k8s.io/queue-name": "gpus",
        "kueue.x-k8s.io/priority-class": "high",
    }


@pytest.mark.parametrize(
    ("scheduler", "queue", "labels"),
    [
        ("None", None, {}),
        ("Volcano", None, {}),
        ("Volcano", "team", {"volcano.sh/queue-name": "team"}),
        (
            "YuniKorn",
            "root.team",
            {
                "ray.io/gang-scheduling-enabled": "true",
                "yunikorn.apache.org/app-id": "c",
                "yunikorn.apache.org/queue": "root.team",
            },
        ),
        ("KAI", "team", {"kai.scheduler/queue": "team"}),
    ],
)
def test_gang_schedulers_find_the_labels_that_kuberay_reads_for_them(
    make_spec: MakeSpec, scheduler: str, queue: str | None, labels: dict[str, str]
) -> None:
    given = {} if queue is None else {"gangSchedulerQueue": queue}
    spec = make_spec(runPolicy={"gangScheduler": scheduler, **given})

    found = ray_cluster(spec, KEY, UID, "c")["metadata"]["labels"]

    assert {name: value for name, value in found.items() if not name.startswith(("ppojob.dev/", "app."))} == labels


def test_ray_has_a_version_a_token_and_no_autoscaler(make_spec: MakeSpec) -> None:
    spec = cluster(make_spec())

    assert spec["rayVersion"] == "2.60.0"
    assert spec["authOptions"] == {"mode": "token", "secretName": "job-12345-ray"}
    assert spec["enableInTreeAutoscaling"] is False


def test_a_group_counts_its_gpus_and_its_pool(make_spec: MakeSpec) -> None:
    params = group(make_spec())["rayStartParams"]

    assert params["num-gpus"] == "2"
    assert params["resources"] == r'"{\"pool_actor\": 2}"'
    # KubeRay pastes it into a shell command: what the shell makes of it must be JSON.
    assert json.loads(json.loads(params["resources"])) == {"pool_actor": 2}


def test_a_group_has_a_fixed_size(make_spec: MakeSpec) -> None:
    found = group(one_pool(make_spec, nodes=3))

    assert (found["replicas"], found["minReplicas"], found["maxReplicas"]) == (3, 3, 3)


@pytest.mark.parametrize(
    ("cpu", "gpus", "scorers", "is_reward_here", "expected"),
    [("8", 2, 1, False, 16), ("300m", 2, 1, False, 2), ("300m", 2, 4, True, 6), ("300m", 2, 4, False, 2)],
)
def test_ray_counts_a_cpu_for_each_gpu_and_each_scorer_even_where_there_are_fewer(
    make_spec: MakeSpec, cpu: str, gpus: int, scorers: int, is_reward_here: bool, expected: int
) -> None:
    spec = make_spec(
        pools=[
            {"name": "actor", "gpusPerNode": gpus, "resourcesPerGPU": {"cpu": cpu}},
            {"name": "critic", "gpusPerNode": 1},
        ],
        reward={"function": {"module": "m", "numWorkers": scorers}},
        placement={"actor": "actor", "critic": "critic", "reward": ["actor" if is_reward_here else "critic"]},
    )

    assert logical_cpus(spec, spec.pools[0]) == expected


def test_scorers_in_several_pools_count_where_they_run(make_spec: MakeSpec) -> None:
    spec = make_spec(
        pools=[
            {"name": "actor", "gpusPerNode": 2, "resourcesPerGPU": {"cpu": "100m"}},
            {"name": "critic", "gpusPerNode": 1, "resourcesPerGPU": {"cpu": "100m"}},
        ],
        reward={"function": {"module": "m", "numWorkers": 6}},
        placement={"actor": "actor", "critic": "critic", "reward": ["critic", "actor"]},
    )

    assert [logical_cpus(spec, pool) for pool in spec.pools] == [2 + 4, 1 + 2]


@pytest.mark.parametrize(
    ("device", "name", "expected"),
    [
        ("CUDA", None, {"nvidia.com/gpu": "2"}),
        ("CUDA", "amd.com/gpu", {"amd.com/gpu": "2"}),
        ("CPU", None, {}),
        ("CPU", "nvidia.com/gpu", {"nvidia.com/gpu": "2"}),
    ],
)
def test_gpus_are_asked_for_under_their_name(
    make_spec: MakeSpec, device: str, name: str | None, expected: dict[str, str]
) -> None:
    pools = [{"name": "actor", "gpusPerNode": 2, **({"gpuResourceName": name} if name else {})}]
    resources = pod(make_spec(device=device, pools=pools, placement={"actor": "actor"}))["containers"][0]["resources"]

    assert resources["limits"] == {"memory": "128Gi", **expected}
    assert resources["requests"] == {"cpu": "16", "memory": "128Gi", **expected}


def test_pods_are_restricted_and_have_no_credentials(make_spec: MakeSpec) -> None:
    spec = cluster(make_spec())
    templates = [spec["headGroupSpec"]["template"], *(each["template"] for each in spec["workerGroupSpecs"])]

    for template in templates:
        found, container = template["spec"], template["spec"]["containers"][0]
        assert found["automountServiceAccountToken"] is False
        assert found["serviceAccountName"] == "job-trainer"
        assert found["securityContext"]["runAsNonRoot"] is True
        assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert "hostNetwork" not in found


def test_the_head_names_rays_own_ports_beside_that_of_the_metrics(make_spec: MakeSpec) -> None:
    # KubeRay makes its Service of the named ports, and of Ray's own by itself only where none is named.
    (ray,) = cluster(make_spec())["headGroupSpec"]["template"]["spec"]["containers"]

    assert {port["name"]: port["containerPort"] for port in ray["ports"]} == {
        "gcs-server": 6379,
        "client": 10001,
        "dashboard": 8265,
        "metrics": 8080,
        "serve": 8000,
        "ppojob-metrics": 9464,
    }


def test_only_the_head_has_the_token_of_the_reports(make_spec: MakeSpec) -> None:
    spec = cluster(make_spec())
    head = spec["headGroupSpec"]["template"]["spec"]

    (token,) = (volume["projected"] for volume in head["volumes"] if "projected" in volume)
    assert token["sources"] == [
        {"serviceAccountToken": {"audience": "ppojob.dev/ns/job/uid-1", "expirationSeconds": 3600, "path": "token"}}
    ]
    assert {"name": "ppojob-token", "mountPath": "/var/run/secrets/ppojob.dev", "readOnly": True} in (
        head["containers"][0]["volumeMounts"]
    )
    assert not any("projected" in volume for volume in pod(make_spec())["volumes"])


def test_storage_file_and_shared_memory_are_mounted(make_spec: MakeSpec) -> None:
    found = pod(make_spec(storage={"claimName": "rl-data", "mountPath": "/mnt/rl"}))

    mounts = {mount["name"]: mount["mountPath"] for mount in found["containers"][0]["volumeMounts"]}
    assert mounts == {"storage": "/mnt/rl", "ppojob-config": "/etc/ppojob", "shared-memory": "/dev/shm"}
    volumes = {volume["name"]: volume for volume in found["volumes"]}
    assert volumes["storage"]["persistentVolumeClaim"] == {"claimName": "rl-data"}
    assert volumes["ppojob-config"]["configMap"] == {"name": "job-job"}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}
    assert found["securityContext"]["fsGroup"] == 1000


def test_a_pool_goes_where_it_belongs(make_spec: MakeSpec) -> None:
    toleration = {"key": "gpu", "operator": "Exists"}
    found = pod(one_pool(make_spec, nodeSelector={"gpu-type": "h200"}, tolerations=[toleration]))

    assert found["nodeSelector"] == {"gpu-type": "h200"}
    assert found["tolerations"][0] == toleration


def test_a_lost_node_is_given_up_after_a_minute_unless_the_user_says_otherwise(make_spec: MakeSpec) -> None:
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    found = pod(one_pool(make_spec, tolerations=[own]))["tolerations"]

    assert own in found
    assert [each["key"] for each in found if each.get("tolerationSeconds") == 60] == ["node.kubernetes.io/not-ready"]


def test_environment_and_pull_secrets_reach_all_pods(make_spec: MakeSpec) -> None:
    variable = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
    source, secret = {"secretRef": {"name": "wandb"}}, {"name": "registry"}
    spec = cluster(make_spec(env=[variable], envFrom=[source], imagePullSecrets=[secret]))

    for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        found = each["template"]["spec"]
        assert variable in found["containers"][0]["env"]
        assert found["containers"][0]["envFrom"] == [source]
        assert found["imagePullSecrets"] == [secret]


def test_a_service_account_of_the_users_is_that_of_all_pods_and_gives_no_token(make_spec: MakeSpec) -> None:
    spec = cluster(make_spec(serviceAccountName="bucket-reader"))

    for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert each["template"]["spec"]["serviceAccountName"] == "bucket-reader"
        assert each["template"]["spec"]["automountServiceAccountToken"] is False


def test_slices_are_counted_by_ray_as_gpus(make_spec: MakeSpec) -> None:
    slices = {"name": "actor", "nodes": 3, "gpusPerNode": 1, "gpuResourceName": "nvidia.com/mig-3g.71gb"}
    (group,) = cluster(make_spec(pools=[slices], placement={"actor": "actor"}))["workerGroupSpecs"]

    assert group["rayStartParams"]["num-gpus"] == "1"
    assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {"pool_actor": 1}
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/mig-3g.71gb"] == "1"


def test_claimed_gpus_are_counted_by_ray_and_asked_of_no_device_plugin(make_spec: MakeSpec) -> None:
    claims = [{"name": "gpus", "resourceClaimTemplateName": "two-h200"}]
    spec = one_pool(make_spec, gpuResourceName="", resourceClaims=claims)
    (group,) = cluster(spec)["workerGroupSpecs"]
    found = group["template"]["spec"]
    (ray,) = found["containers"]

    assert group["rayStartParams"]["num-gpus"] == "2"
    assert found["resourceClaims"] == claims
    assert ray["resources"]["claims"] == [{"name": "gpus"}]
    assert set(ray["resources"]["limits"]) == {"memory"}
    assert "resourceClaims" not in cluster(spec)["headGroupSpec"]["template"]["spec"]


def test_a_claim_may_bring_another_device_beside_the_gpus(make_spec: MakeSpec) -> None:
    claims = [{"name": "nics", "resourceClaimTemplateName": "eight-nics"}]
    (ray,) = pod(one_pool(make_spec, gpuResourceName="nvidia.com/gpu", resourceClaims=claims))["containers"]

    assert ray["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert ray["resources"]["claims"] == [{"name": "nics"}]


def test_a_user_may_send_rays_usage_statistics(make_spec: MakeSpec) -> None:
    env = pod(make_spec(env=[{"name": "RAY_USAGE_STATS_ENABLED", "value": "1"}]))["containers"][0]["env"]

    assert [variable["value"] for variable in env if variable["name"] == "RAY_USAGE_STATS_ENABLED"] == ["1"]


@pytest.mark.parametrize("kind", ["required", "preferred"])
def test_kueue_reads_the_topology_of_a_pool_from_its_pod_template(make_spec: MakeSpec, kind: str) -> None:
    template = {"metadata": {"annotations": {"own": "note"}}}
    spec = one_pool(make_spec, nodes=2, topology={kind: "example.com/rack"}, podTemplate=template)

    annotations = group(spec)["template"]["metadata"]["annotations"]

    assert annotations == {f"kueue.x-k8s.io/podset-{kind}-topology": "example.com/rack", "own": "note"}
    assert "annotations" not in group(one_pool(make_spec))["template"]["metadata"]


def test_a_pool_of_one_is_not_spread(make_spec: MakeSpec) -> None:
    found = pod(one_pool(make_spec, spread="Required"))

    assert "affinity" not in found
    assert "topologySpreadConstraints" not in found


def test_pods_are_spread_as_asked(make_spec: MakeSpec) -> None:
    preferred, required = (pod(one_pool(make_spec, nodes=2, spread=spread)) for spread in ("Preferred", "Required"))

    assert preferred["topologySpreadConstraints"][0]["whenUnsatisfiable"] == "ScheduleAnyway"
    (term,) = required["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"] == {"ray.io/cluster": "job-12345", "ppojob.dev/pool": "actor"}


def test_what_is_compiled_for_a_gpu_is_kept_in_the_storage_unless_the_user_says_where(make_spec: MakeSpec) -> None:
    def variables(**fields: Any) -> dict[str, str]:
        (ray,) = pod(make_spec(**fields))["containers"]
        return {variable["name"]: variable["value"] for variable in ray["env"]}

    storage = {"claimName": "c", "mountPath": "/mnt/shared"}
    own = variables(storage=storage, env=[{"name": "TRITON_CACHE_DIR", "value": "/tmp/triton"}])
    assert own["VLLM_CACHE_ROOT"] == "/mnt/shared/.ppojob-cache/vllm"
    assert own["TORCHINDUCTOR_CACHE_DIR"] == "/mnt/shared/.ppojob-cache/inductor"
    assert own["TRITON_CACHE_DIR"] == "/tmp/triton"
    assert not [name for name in variables(device="CPU") if "CACHE" in name]


def test_the_hosts_network_brings_its_own_dns_policy(make_spec: MakeSpec) -> None:
    found = pod(one_pool(make_spec, network={"hostNetwork": True}))

    assert found["hostNetwork"] is True
    assert found["dnsPolicy"] == "ClusterFirstWithHostNet"


def test_rdma_devices_are_asked_for_by_each_pod_and_may_lock_memory(make_spec: MakeSpec) -> None:
    network = {"rdma": {"resourceName": "rdma/hca", "count": 4}}
    (ray,) = pod(one_pool(make_spec, network=network))["containers"]

    wanted = {"nvidia.com/gpu": "2", "rdma/hca": "4"}
    assert ray["resources"]["limits"] == {"memory": "128Gi", **wanted}
    assert ray["resources"]["requests"] == {"cpu": "16", "memory": "128Gi", **wanted}
    assert ray["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_a_pools_network_sets_its_own_pods_variables_over_the_jobs(make_spec: MakeSpec) -> None:
    network = {"interface": "eth1", "nccl": {"NCCL_IB_HCA": "mlx5_0"}}
    spec = make_spec(
        env=[{"name": "NCCL_IB_HCA", "value": "mlx5_7"}],
        pools=[{"name": "actor", "gpusPerNode": 2, "network": network}, {"name": "critic", "gpusPerNode": 1}],
    )
    own, other = (
        {variable["name"]: variable["value"] for variable in pod(spec, index)["containers"][0]["env"]}
        for index in range(2)
    )

    caches = {name: value for name, value in own.items() if "_CACHE_" in name}
    assert own == caches | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_IB_HCA": "mlx5_0",
    }
    assert other == caches | {"RAY_USAGE_STATS_ENABLED": "0", "NCCL_IB_HCA": "mlx5_7"}


def test_labels_name_job_and_pool(make_spec: MakeSpec) -> None:
    spec = cluster(make_spec())

    assert spec["workerGroupSpecs"][1]["template"]["metadata"]["labels"]["ppojob.dev/pool"] == "critic"
    head = spec["headGroupSpec"]["template"]["metadata"]["labels"]
    assert head["ppojob.dev/job"] == "job"
    assert "ppojob.dev/pool" not in head


def test_a_good_spec_has_no_problems(make_spec: MakeSpec) -> None:
    assert list(template_problems(make_spec(), KEY, UID)) == []


@pytest.mark.parametrize(
    ("quantity", "factor", "product"),
    [("300m", 2, "600m"), ("64Gi", 8, "512Gi"), ("1.5Gi", 3, "4.5Gi"), ("0.5", 4, "2"), ("100", 10, "1000")],
)
def test_a_quantity_is_multiplied_in_its_own_unit(quantity: str, factor: int, product: str) -> None:
    assert times(quantity, factor) == product
