"""At its start, an operator logs how CRD and policy of the cluster differ from its own."""

import copy
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from ppojob_api.v1alpha1.policy import admission_policy
from ppojob_api.v1alpha1.schema import custom_resource_definition, custom_resource_definitions
from ppojob_operator.api_server import Answer, ApiUnavailable
from ppojob_operator.definition import log_differences

KIND = {"group": "ppojob.dev", "version": "v1alpha1", "kind": "PPOJob"}


POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/ppojobs.ppojob.dev"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/ppojobs.ppojob.dev"


class Server:
    """An API server that publishes a schema, and has this operator's policy unless `changed` has another answer."""

    def __init__(
        self,
        schema: Any,
        status: int = 200,
        error: Exception | None = None,
        changed: Mapping[str, Answer] | None = None,
        templates: Mapping[str, Any] | None = None,
    ) -> None:
        listed = {"properties": {"items": {}}, "x-kubernetes-group-version-kind": [{**KIND, "kind": "PPOJobList"}]}
        published = {**schema, "x-kubernetes-group-version-kind": [KIND]}
        policy, binding = copy.deepcopy(admission_policy())
        self.answers = {
            "/openapi/v3/apis/ppojob.dev/v1alpha1": Answer(
                status,
                {"components": {"schemas": {"list": listed, "job": published, **(templates or template_schemas())}}},
            ),
            POLICIES: Answer(200, policy),
            BINDINGS: Answer(200, binding),
            **(changed or {}),
        }
        self.error = error

    async def call(self, method: str, path: str) -> Answer:
        assert method == "GET"
        if self.error is not None:
            raise self.error
        return self.answers[path]


def own() -> Any:
    """Return the schema of this version."""
    [version] = custom_resource_definition()["spec"]["versions"]
    return copy.deepcopy(version["schema"]["openAPIV3Schema"])


def template_schemas() -> dict[str, Any]:
    """Return the schemas of this version's templates, as they are published, by kind."""
    _, *crds = custom_resource_definitions()
    return {
        (kind := crd["spec"]["names"]["kind"]): {
            **copy.deepcopy(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]),
            "x-kubernetes-group-version-kind": [{**KIND, "kind": kind}],
        }
        for crd in crds
    }


async def said(server: Server, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Return what is logged."""
    caplog.set_level(logging.INFO)
    await log_differences(server, "0.1.0")  # type: ignore[arg-type]
    return [(record.levelno, record.getMessage()) for record in caplog.records]


async def test_the_same_definition_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert await said(Server(own()), caplog) == []


async def test_an_older_definition_is_named_with_what_it_lacks_and_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    schema = own()
    del schema["properties"]["status"]["properties"]["operator"]
    del schema["properties"]["spec"]["properties"]["pools"]["items"]["properties"]["minNodes"]

    [(level, words)] = await said(Server(schema), caplog)

    assert level == logging.ERROR
    assert "older than this operator (0.1.0): it lacks spec.pools[].minNodes, status.operator, and no status" in words
    assert "apply crds/ppojobs.ppojob.dev.yaml of this version" in words


async def test_an_older_definition_of_templates_is_named_with_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    schemas = template_schemas()
    del schemas["PPOJobTemplate"]["properties"]["spec"]["properties"]["limits"]
    del schemas["ClusterPPOJobTemplate"]

    words = [words for _, words in await said(Server(own(), templates=schemas), caplog)]

    assert [each.partition(" in the cluster")[0] for each in words] == [
        "the PPOJobTemplate CRD",
        "the ClusterPPOJobTemplate CRD",
    ]
    assert "it lacks spec.limits, and no template with these fields" in words[0]
    assert "it lacks spec, and no template" in words[1]
    assert "apply crds/clusterppojobtemplates.ppojob.dev.yaml" in words[1]


async def test_a_newer_definition_is_named_with_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    schema = own()
    for number in range(7):
        schema["properties"]["spec"]["properties"][f"new{number}"] = {"type": "string"}

    [(level, words)] = await said(Server(schema), caplog)

    assert level == logging.WARNING
    assert "newer than this operator (0.1.0)" in words
    assert (
        "it has spec.new0, spec.new1, spec.new2, spec.new3, spec.new4 and 2 more; jobs with these fields in their spec"
        in words
    )


@pytest.mark.parametrize(
    ("server", "num_lines"),
    [(Server(own(), status=404), 0), (Server(own(), status=403), 0), (Server(own(), error=ApiUnavailable("503")), 2)],
    ids=["none", "forbidden", "away"],
)
async def test_a_definition_that_cannot_be_read_stops_nobody(
    server: Server, num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    lines = await said(server, caplog)

    assert [level for level, _ in lines] == [logging.INFO] * num_lines


@pytest.mark.parametrize(
    ("path", "kind"),
    [(POLICIES, "ValidatingAdmissionPolicy"), (BINDINGS, "ValidatingAdmissionPolicyBinding")],
)
async def test_a_missing_policy_or_binding_is_named_with_the_remedy(
    path: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    [(level, words)] = await said(Server(own(), changed={path: Answer(404, {})}), caplog)

    assert level == logging.ERROR
    assert f"the cluster has no {kind} ppojobs.ppojob.dev: " in words
    assert "apply crds/ppojobs-policy.yaml of this version" in words


async def test_a_policy_of_another_version_is_named(caplog: pytest.LogCaptureFixture) -> None:
    [other, _] = copy.deepcopy(admission_policy())
    del other["spec"]["variables"][0]

    [(level, words)] = await said(Server(own(), changed={POLICIES: Answer(200, other)}), caplog)

    assert level == logging.WARNING
    assert "in the cluster has other rules than this operator (0.1.0): apply crds/ppojobs-policy.yaml" in words


async def test_a_policy_that_may_not_be_read_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    assert await said(Server(own(), changed={POLICIES: Answer(403, {}), BINDINGS: Answer(403, {})}), caplog) == []
