"""Templates: what they may say, how a job's spec is completed with one, and whose value an error is about."""

from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.schema import custom_resource_definitions, structural
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.template_reference import PinnedTemplate, TemplateKind, TemplateRef
from ppojob_api.v1alpha1.templates import (
    OF_THE_JOB_ONLY,
    TEMPLATED,
    capped,
    completed,
    document_problems,
    parse_among,
    parse_with,
    pinned,
    template_problems,
)
from ppojob_api.v1alpha1.validation import SpecError
from tests.bad_templates import BAD_TEMPLATES, BAD_TOGETHER, JOB, TEMPLATE, BadTemplate, BadTogether, changed

REF = TemplateRef(name="gpus")


def pin(**spec: Any) -> PinnedTemplate:
    return pinned(REF, {"metadata": {"uid": "t-1", "generation": 4}, "spec": spec})


def merged(job: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return what a template with this spec makes of a job's."""
    return completed(job, spec)


# What a template may say.


@pytest.mark.parametrize("bad", BAD_TEMPLATES, ids=lambda bad: bad.name)
def test_a_bad_template_is_explained_by_path(bad: BadTemplate) -> None:
    [problem] = template_problems(bad.manifest()["spec"])

    assert problem.path == bad.path
    assert bad.says in problem.message


def test_a_template_in_a_file_needs_version_name_and_spec() -> None:
    assert document_problems(TEMPLATE) == []
    assert [str(each) for each in document_problems({"kind": "PPOJobTemplate", "specs": {}})] == [
        "specs: there is no such field: correct its name or remove it",
        "apiVersion: must be ppojob.dev/v1alpha1",
        "metadata.name: this field is required: add it",
        "spec: this field is required: add it",
    ]


def defaults_in(schema: Any) -> set[str]:
    """Return the defaults in a schema, other than empty objects, which take precedence over nothing."""
    if isinstance(schema, list):
        return {each for item in schema for each in defaults_in(item)}
    if not isinstance(schema, dict):
        return set()
    own = {repr(schema["default"])} if schema.get("default") not in (None, {}) and "type" in schema else set()
    return own | {each for item in schema.values() for each in defaults_in(item)}


def test_the_api_server_stores_no_default_of_a_field_that_a_template_may_set() -> None:
    job, *templates = (crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for crd in custom_resource_definitions())
    fields = job["properties"]["spec"]["properties"]
    stored = {name: defaults_in(fields[name]) for name in TEMPLATED}

    assert stored.pop("runPolicy") == {"False"}, "that of suspend, which is of the job alone"
    assert not any(stored.values())
    assert defaults_in([each["properties"]["spec"] for each in templates]) == set()
    assert defaults_in(structural(PPOJobSpec)["properties"]["runPolicy"]) > {"6", "1800"}, "readers fill them in"


def test_what_the_api_server_does_not_store_is_in_the_description() -> None:
    [job, *_] = custom_resource_definitions()
    spec = job["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]

    assert spec["runPolicy"]["properties"]["backoffLimit"]["description"].endswith("Default: 6.")
    assert spec["storage"]["properties"]["mountPath"]["description"].endswith('Default: "/data".')


# How a spec is completed.


def test_the_values_of_the_job_take_precedence_also_where_they_equal_a_default() -> None:
    template = {"image": "theirs:1", "runPolicy": {"backoffLimit": 3, "restartOnStall": False}}

    made = merged({"runPolicy": {"backoffLimit": 6}}, template=template)

    assert made == {"image": "theirs:1", "runPolicy": {"backoffLimit": 6, "restartOnStall": False}}


def test_variables_are_merged_by_name_and_each_is_replaced_whole() -> None:
    theirs = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    ours = [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, {"name": "C", "value": "3"}]

    assert merged({"env": ours}, template={"env": theirs})["env"] == [ours[0], theirs[1], ours[1]]


def test_lists_without_a_key_are_appended_or_replaced_as_in_pod_templates() -> None:
    theirs = {"imagePullSecrets": [{"name": "a"}], "envFrom": [{"secretRef": {"name": "a"}}]}
    ours = {"imagePullSecrets": [{"name": "a"}, {"name": "b"}], "envFrom": [{"secretRef": {"name": "b"}}]}
    rules = {"failurePolicy": {"rules": [{"action": "Fail"}]}}

    made = merged({**ours, "runPolicy": rules}, template={**theirs, "runPolicy": {"failurePolicy": {"rules": []}}})

    assert made["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    assert made["envFrom"] == [{"secretRef": {"name": "a"}}, {"secretRef": {"name": "b"}}]
    assert made["runPolicy"] == rules


def test_a_job_gets_the_pools_that_it_names_each_completed() -> None:
    pools = [{"name": "h200", "gpusPerNode": 8, "nodeSelector": {"gpu": "h200"}}, {"name": "a100", "gpusPerNode": 4}]
    defaults = {"nodeSelector": {"zone": "a", "gpu": "any"}, "tolerations": [{"key": "gpu"}], "nodes": 2}
    ours = [{"name": "h200", "nodes": 3, "tolerations": [{"key": "ours"}]}, {"name": "own", "gpusPerNode": 1}]

    made = merged({"pools": ours}, template={"pools": pools}, poolDefaults=defaults)["pools"]

    assert made == [
        {
            "name": "h200",
            "nodes": 3,
            "gpusPerNode": 8,
            "nodeSelector": {"zone": "a", "gpu": "h200"},
            "tolerations": [{"key": "gpu"}, {"key": "ours"}],
        },
        {"name": "own", "gpusPerNode": 1, **defaults},
    ]


def test_a_job_without_pools_gets_all_of_the_template() -> None:
    pools = [{"name": "h200", "gpusPerNode": 8}, {"name": "a100", "gpusPerNode": 4}]

    assert merged({}, template={"pools": pools})["pools"] == pools
    assert "pools" not in merged({}, template={})


def test_a_topology_is_replaced_because_only_one_of_its_fields_may_be_set() -> None:
    theirs, ours = {"name": "a", "topology": {"required": "rack"}}, {"name": "a", "topology": {"preferred": "block"}}

    assert merged({"pools": [ours]}, template={"pools": [theirs]})["pools"] == [ours]


def test_pod_templates_are_merged_as_the_operator_merges_them_into_pods() -> None:
    theirs = {"spec": {"containers": [{"name": "log", "image": "log:1"}], "priorityClassName": "low"}}
    ours = {"spec": {"containers": [{"name": "log", "env": [{"name": "A", "value": "1"}]}, {"name": "own"}]}}

    made = merged({"head": {"podTemplate": ours}}, template={"head": {"podTemplate": theirs}})

    assert made["head"]["podTemplate"]["spec"] == {
        "containers": [{"name": "log", "image": "log:1", "env": [{"name": "A", "value": "1"}]}, {"name": "own"}],
        "priorityClassName": "low",
    }


def test_mounts_are_merged_by_the_folder_however_its_path_is_written() -> None:
    def pool(path: str, volume: str) -> dict[str, Any]:
        mounts = [{"name": volume, "mountPath": path}]
        return {"name": "a", "podTemplate": {"spec": {"containers": [{"name": "ray-worker", "volumeMounts": mounts}]}}}

    found = merged({"pools": [pool("//cache/./", "mine")]}, template={"pools": [pool("/cache", "theirs")]})

    [container] = found["pools"][0]["podTemplate"]["spec"]["containers"]
    assert container["volumeMounts"] == [{"name": "mine", "mountPath": "//cache/./"}]


def test_a_list_with_an_item_without_its_key_is_left_to_those_who_refuse_it() -> None:
    assert merged({"env": [{"value": "1"}]}, template={"env": [{"name": "A"}]})["env"] == [{"value": "1"}]
    assert merged({"env": [{"name": ["A"]}]}, template={"env": [{"name": "A"}]})["env"] == [{"name": ["A"]}]
    ports, ours = [{"containerPort": 80}], [{"containerPort": {}}]
    assert merged({"ports": ours}, template={"ports": ports})["ports"] == ours
    assert merged({"pools": "none"}, template={"pools": [{"name": "a"}]})["pools"] == "none"
    assert merged({"runPolicy": 3}, template={}, limits={"maxActiveDeadlineSeconds": 9})["runPolicy"] == 3


def test_neither_job_nor_template_is_changed() -> None:
    job, template = changed(JOB["spec"], {("pools",): [{"name": "actor"}]}), changed(TEMPLATE["spec"], {})
    before = repr((job, template))

    completed(job, template)

    assert repr((job, template)) == before


# The completed spec.


def test_a_job_and_its_template_make_a_spec() -> None:
    wire, spec = parse_with(JOB["spec"], pin(**TEMPLATE["spec"]))

    assert isinstance(spec, PPOJobSpec)
    assert spec.image == "trainer:1"
    assert [(pool.name, pool.gpus, pool.node_selector) for pool in spec.pools] == [
        ("actor", 2, {"gpu-type": "h200"}),
        ("critic", 1, {"gpu-type": "h200"}),
    ]
    assert (spec.run_policy.backoff_limit, spec.run_policy.active_deadline_seconds) == (3, 3600)
    assert wire["runPolicy"]["activeDeadlineSeconds"] == 3600, "the limit is the deadline of a job without one"


def test_the_trainer_does_not_see_the_template() -> None:
    _, spec = parse_with(JOB["spec"], pin(**TEMPLATE["spec"]))
    assert isinstance(spec, PPOJobSpec)

    text = JobFile(namespace="n", name="j", uid="u", root="/data", spec=resolve(spec)).encode()

    assert "templateRef" not in text
    assert JobFile.decode(text, reader="0.3.0").spec.image == "trainer:1"


@pytest.mark.parametrize("bad", BAD_TOGETHER, ids=lambda bad: bad.name)
def test_a_bad_completed_spec_is_explained_and_says_whose_value_it_is(bad: BadTogether) -> None:
    _, error = parse_with(bad.job_spec(), pin(**bad.template_spec()))

    assert isinstance(error, SpecError)
    [problem] = error.errors
    assert problem.path == bad.path
    assert bad.says in problem.message
    assert ("(the value is from PPOJobTemplate gpus)" in problem.message) == bad.is_of_the_template


@pytest.mark.parametrize("bad", BAD_TEMPLATES, ids=lambda bad: bad.name)
def test_a_job_with_a_bad_template_is_refused_with_the_template_s_problem(bad: BadTemplate) -> None:
    _, error = parse_with(JOB["spec"], pin(**bad.manifest()["spec"]))

    assert isinstance(error, SpecError)
    [problem] = error.errors
    assert problem.path == bad.path
    assert problem.message.endswith("(in PPOJobTemplate gpus)")


def test_an_accepted_job_that_asks_for_more_keeps_the_limit() -> None:
    limited = pin(limits={"maxActiveDeadlineSeconds": 3600})

    assert capped({"runPolicy": {"activeDeadlineSeconds": 7200}}, limited)["runPolicy"]["activeDeadlineSeconds"] == 3600
    assert capped({"runPolicy": {"activeDeadlineSeconds": 60}}, limited)["runPolicy"]["activeDeadlineSeconds"] == 60
    assert capped({}, pin()) == {}


# Among the documents of files.


def test_the_template_is_found_by_kind_and_name() -> None:
    cluster = {**TEMPLATE, "kind": "ClusterPPOJobTemplate"}
    other = {**TEMPLATE, "metadata": {"name": "other"}}

    assert parse_among(JOB["spec"], [other, cluster, TEMPLATE]).image == "trainer:1"
    of_the_cluster = changed(JOB["spec"], {("templateRef", "kind"): TemplateKind.CLUSTER.value})
    assert parse_among(of_the_cluster, [cluster]).image == "trainer:1"


@pytest.mark.parametrize(
    ("documents", "says"),
    [([], "there is no PPOJobTemplate of this name"), ([TEMPLATE, TEMPLATE], "several templates")],
    ids=["none", "two"],
)
def test_a_template_that_is_missing_or_doubled_is_named(documents: list[Any], says: str) -> None:
    with pytest.raises(SpecError, match=rf"spec\.templateRef\.name: 'gpus': {says}.*--template"):
        parse_among(JOB["spec"], documents)


def test_a_reference_that_is_none_is_explained_like_any_field() -> None:
    with pytest.raises(SpecError, match=r"spec\.templateRef\.kind: 'Template': Input should be 'PPOJobTemplate'"):
        parse_among(changed(JOB["spec"], {("templateRef", "kind"): "Template"}), [TEMPLATE])


# Defaults that the API server does not store.

DEFAULTS = {
    "pools[].nodes": 1,
    "pools[].resourcesPerGPU.cpu": "8",
    "pools[].resourcesPerGPU.memory": "64Gi",
    "pools[].resourcesPerGPU.shm": "16Gi",
    "pools[].spread": "Preferred",
    "pools[].network.hostNetwork": False,
    "pools[].network.rdma.count": 1,
    "head.resources.cpu": "2",
    "head.resources.memory": "8Gi",
    "storage.mountPath": "/data",
    "telemetry.trackerProject": "ppojob",
    "telemetry.prometheusPort": 9464,
    "telemetry.samplesPerStep": 4,
    "telemetry.profile.memory": False,
    "runPolicy.gangScheduler": "None",
    "runPolicy.stopGracePeriodSeconds": 600,
    "runPolicy.backoffLimit": 6,
    "runPolicy.startupDeadlineSeconds": 1800,
    "runPolicy.partialPodsTimeoutSeconds": 3600,
    "runPolicy.stallTimeoutSeconds": 1800,
    "runPolicy.restartOnStall": True,
}
"""Those of v1alpha1. A new field is added here; a changed default would restart running jobs at an upgrade."""


def own_defaults(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the default of each field in a schema, but for empty objects."""
    if schema.get("default") not in (None, {}) and path not in OF_THE_JOB_ONLY:
        yield path, schema["default"]
    for name, inner in schema.get("properties", {}).items():
        yield from own_defaults(inner, f"{path}.{name}")
    if isinstance(schema.get("items"), dict):
        yield from own_defaults(schema["items"], f"{path}[]")


def test_defaults_that_the_api_server_does_not_store_are_never_changed() -> None:
    fields = structural(PPOJobSpec)["properties"]

    assert dict(found for name in TEMPLATED for found in own_defaults(fields[name], name)) == DEFAULTS
