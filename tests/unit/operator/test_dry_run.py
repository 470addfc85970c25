"""A RayCluster and its pods are tried on the API server without being stored, and its words are returned."""

from typing import Any

import pytest
from aiohttp import web

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_operator.api_server import ApiFailed, ApiRefused, ApiUnavailable
from ppojob_operator.cluster import Cluster
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.plan import JobKey
from tests.unit.operator.fake_api_server import connected
from tests.unit.operator.reconcile.worlds import spec

WANTED = ray_cluster(resolve(parse_spec(spec())), JobKey("rl-team", "arithmetic"), "uid-1", "arithmetic-next")


@pytest.mark.parametrize(
    ("status", "words"),
    [(201, ""), (200, ""), (422, "422 expected string, got true"), (500, "expected string, got true")],
)
async def test_nothing_is_stored_and_a_refusal_is_returned(status: int, words: str) -> None:
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        return web.json_response({"message": "expected string, got true"}, status=status)

    async with connected(answer) as api:
        found = await Cluster(api, reporter="operator").dry_run(WANTED)

    assert words in found
    assert bool(found) == bool(words)
    assert {request.query["dryRun"] for request in asked} == {"All"}
    assert asked[0].method == "PATCH"
    assert asked[0].path.endswith("/namespaces/rl-team/rayclusters/arithmetic-next")
    pods = [(request.method, request.path) for request in asked[1:]]
    groups = 1 + len(WANTED["spec"]["workerGroupSpecs"])
    assert pods == ([] if words else groups * [("POST", "/api/v1/namespaces/rl-team/pods")])


OF_A_POD = [
    (
        422,
        'Pod "x-1" is invalid: [spec.volumes[3].name: Duplicate value: "a", metadata.labels: Invalid value: "b c"]',
        '[{0}.spec.volumes[3].name: Duplicate value: "a", {0}.metadata.labels: Invalid value: "b c"]',
    ),
    (
        422,
        'Pod "x-1" is invalid: spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Invalid value: "spec.x"',
        '{0}.spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Invalid value: "spec.x"',
    ),
    (
        403,
        'pods "x-1" is forbidden: no PriorityClass with name high was found',
        "{0}: no PriorityClass with name high was found",
    ),
    (
        403,
        'pods "x-1" is forbidden: violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)',
        '{0}: violates PodSecurity "restricted:latest": host namespaces (hostNetwork=true)',
    ),
    (
        400,
        'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal number into field spec.hostname',
        "json: cannot unmarshal number into field {0}.spec.hostname",
    ),
    (
        400,
        'admission webhook "policy.example.com" denied the request: no team',
        '{0}: 400 admission webhook "policy.example.com" denied the request: no team',
    ),
]


@pytest.mark.parametrize(("status", "words", "expected"), OF_A_POD)
@pytest.mark.parametrize(("group", "path"), [(0, "spec.head.podTemplate"), (2, "spec.pools[1].podTemplate")])
async def test_a_pod_that_would_be_refused_is_named_by_its_template_in_the_ppojob(
    group: int, path: str, status: int, words: str, expected: str
) -> None:
    tried: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "PATCH":
            return web.json_response({}, status=201)
        tried.append(await request.json())
        if len(tried) <= group:
            return web.json_response({}, status=201)
        return web.json_response({"message": words}, status=status)

    async with connected(answer) as api:
        found = await Cluster(api, reporter="operator").dry_run(WANTED)

    assert found == expected.format(path)
    templates = [each["template"] for each in (WANTED["spec"]["headGroupSpec"], *WANTED["spec"]["workerGroupSpecs"])]
    assert [each["spec"] for each in tried] == [template["spec"] for template in templates[: group + 1]]
    for pod, template in zip(tried, templates, strict=False):
        assert pod["metadata"].items() >= template["metadata"].items()
        assert pod["metadata"]["ownerReferences"] == WANTED["metadata"]["ownerReferences"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (403, 'rayclusters.ray.io "x" is forbidden: exceeded quota: team, requested: count/rayclusters.ray.io=1'),
        (400, 'admission webhook "x.example.com" does not support dry run'),
        (403, 'pods is forbidden: User "operator" cannot create resource "pods" in API group ""'),
    ],
)
async def test_what_says_nothing_about_a_later_request_is_no_refusal(status: int, words: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        if words.startswith("pods") and request.method == "PATCH":
            return web.json_response({}, status=201)
        return web.json_response({"message": words}, status=status)

    async with connected(answer) as api:
        assert await Cluster(api, reporter="operator").dry_run(WANTED) == ""


async def test_an_api_server_that_cannot_answer_now_is_asked_again() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"message": "slowly"}, status=429)

    async with connected(answer) as api:
        with pytest.raises(ApiUnavailable):
            await Cluster(api, reporter="operator").dry_run(WANTED)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (
            ".spec.workerGroupSpecs[1].template.spec.foo: field not declared in schema",
            "spec.pools[1].podTemplate.spec.foo",
        ),
        (
            'RayCluster "x" is invalid: spec.headGroupSpec.template.spec.containers[0].image: Required value',
            "spec.head.podTemplate.spec.containers[0].image",
        ),
    ],
)
@pytest.mark.parametrize("status", [422, 500])
async def test_a_refused_pod_template_is_named_by_its_field_in_the_ppojob(words: str, field: str, status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"message": "not found"}, status=404)
        return web.json_response({"message": words}, status=status)

    async with connected(answer) as api:
        cluster = Cluster(api, reporter="operator")
        assert (await cluster.dry_run(WANTED)).endswith(f"{words}; see {field} of the PPOJob")
        with pytest.raises(ApiRefused if status == 422 else ApiFailed, match="of the PPOJob"):
            await cluster.apply(WANTED)
