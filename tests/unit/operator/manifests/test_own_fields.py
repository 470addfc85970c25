"""A path of a merged pod becomes that of the user's field, or stays if it names what the operator adds."""

from collections.abc import Callable
from typing import Any

import pytest

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests.own_fields import with_own_fields
from ppojob_operator.plan import JobKey

SIDECAR = {"name": "sidecar", "image": "a b", "env": [{"name": "A"}], "volumeMounts": [{"mountPath": "/x"}]}
RAYS = {
    "name": "ray-worker",
    "env": [{"name": "NCCL_DEBUG", "value": 1}],
    "volumeMounts": [{"name": "x", "mountPath": "/cache/"}],
}
TEMPLATE = {
    "spec": {
        "containers": [SIDECAR, RAYS],
        "initContainers": [{"name": "first", "image": ""}],
        "volumes": [{"name": "other"}],
        "tolerations": [{"key": "mine"}],
        "hostAliases": [{"ip": 5}],
    }
}
POOLS = [
    {"name": "actor", "gpusPerNode": 2, "tolerations": [{"key": "pools", "tolerationSeconds": "5"}]},
    {"name": "critic", "gpusPerNode": 1, "podTemplate": TEMPLATE},
]
SECTIONS: dict[str, Any] = {
    "pools": POOLS,
    "placement": {"actor": "actor", "critic": "critic"},
    "head": {"podTemplate": {"spec": {"containers": [{"name": "logs", "image": "a b"}]}}},
    "env": [{"name": "FIRST", "value": "a"}, {"name": "SECOND", "value": "b"}],
    "imagePullSecrets": [{"name": "a"}],
}
CRITIC = "spec.pools[1].podTemplate"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("{}.spec.containers[1].image: Invalid value", "{}.spec.containers[0].image: Invalid value"),
        ("{}.spec.containers[1].env[0].value: Required", "{}.spec.containers[0].env[0].value: Required"),
        ("{}.spec.containers[1].volumeMounts[0].name", "{}.spec.containers[0].volumeMounts[0].name"),
        # Of our container: what the user adds to it.
        ("{}.spec.containers[0].volumeMounts[3].name", "{}.spec.containers[1].volumeMounts[0].name"),
        ("{}.spec.initContainers[0].image", "{}.spec.initContainers[0].image"),
        ("{}.spec.volumes[3]: Required value", "{}.spec.volumes[0]: Required value"),
        ("{}.spec.tolerations[2].operator", "{}.spec.tolerations[0].operator"),
        ("{}.spec.hostAliases[0].ip", "{}.spec.hostAliases[0].ip"),
        # What the operator adds.
        ("{}.spec.volumes[0]: Forbidden", "{}.spec.volumes[0]: Forbidden"),
        ("{}.spec.containers[0].volumeMounts[0]", "{}.spec.containers[0].volumeMounts[0]"),
        ("{}.spec.tolerations[0].key", "{}.spec.tolerations[0].key"),
        # What is not there.
        ("{}.spec.containers[9].image", "{}.spec.containers[9].image"),
        ("{}.spec.nonsense[0].a", "{}.spec.nonsense[0].a"),
        ("spec.pools[7].podTemplate.spec.containers[1]", "spec.pools[7].podTemplate.spec.containers[1]"),
        # Other fields of the spec.
        ("spec.pools[0].podTemplate.spec.tolerations[0].key: bad", "spec.pools[0].tolerations[0].key: bad"),
        ("spec.head.podTemplate.spec.containers[1].image: bad", "spec.head.podTemplate.spec.containers[0].image: bad"),
        ("spec.head.podTemplate.spec.containers[0].env[2].value", "spec.env[1].value"),
        ("spec.head.podTemplate.spec.imagePullSecrets[0].name", "spec.imagePullSecrets[0].name"),
        # Several at once, and none.
        (
            "[{0}.spec.containers[1].image: Required, {0}.spec.volumes[3].name: Duplicate]",
            "[{0}.spec.containers[0].image: Required, {0}.spec.volumes[0].name: Duplicate]",
        ),
        ("no PriorityClass with name high was found", "no PriorityClass with name high was found"),
        ("{}: violates PodSecurity", "{}: violates PodSecurity"),
    ],
)  # fmt: skip
def test_a_path_of_the_merged_pod_is_that_of_the_users_field(
    make_spec: Callable[..., PPOJobSpec], words: str, expected: str
) -> None:
    found = with_own_fields(words.format(CRITIC), make_spec(**SECTIONS), JobKey("ns", "job"), "uid-1")

    assert found == expected.format(CRITIC)
