"""Bad templates, one mistake each: its message, and whether the API server refuses the template or the job.

The unit tests of the contract and the integration test against the real API server read these tables. All of
them are changes of `TEMPLATE`; `JOB` is a job that is complete only with it.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.good_spec import GONE, GOOD, Step

TEMPLATE: dict[str, Any] = {
    "apiVersion": "ppojob.dev/v1alpha1",
    "kind": "PPOJobTemplate",
    "metadata": {"name": "gpus"},
    "spec": {
        "template": {
            "image": "trainer:1",
            "storage": {"claimName": "ppojob-data"},
            "pools": [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}],
            "runPolicy": {"backoffLimit": 3},
        },
        "poolDefaults": {"nodeSelector": {"gpu-type": "h200"}},
        "limits": {"maxGPUs": 8, "maxActiveDeadlineSeconds": 3600},
    },
}
_OF_THE_TEMPLATE = ("image", "storage", "pools")
JOB: dict[str, Any] = {
    **GOOD,
    "spec": {
        "templateRef": {"name": "gpus"},
        **{name: value for name, value in GOOD["spec"].items() if name not in _OF_THE_TEMPLATE},
    },
}


@dataclass(frozen=True)
class BadTemplate:
    """One mistake of a template, whatever a job adds to it."""

    name: str
    changes: Mapping[tuple[Step, ...], Any]
    """New values by their places in the spec of `TEMPLATE`."""
    path: str
    """The path of the field that is named."""
    says: str
    """What the message must contain."""
    server_refuses: bool = True
    """Whether the API server refuses it, with strict field validation as kubectl asks for."""

    def manifest(self) -> dict[str, Any]:
        """Return the whole bad template."""
        return {**TEMPLATE, "spec": changed(TEMPLATE["spec"], self.changes)}


@dataclass(frozen=True)
class BadTogether:
    """A template and a job of which each may be good, and which cannot be combined."""

    name: str
    template: Mapping[tuple[Step, ...], Any]
    """New values by their places in the spec of `TEMPLATE`."""
    job: Mapping[tuple[Step, ...], Any]
    """New values by their places in the spec of `JOB`."""
    path: str
    """The path of the job's field that is named."""
    says: str
    """What the message must contain."""
    is_of_the_template: bool = False
    """Whether the message must say that the value comes from the template."""

    def template_spec(self) -> dict[str, Any]:
        """Return the spec of the template."""
        return changed(TEMPLATE["spec"], self.template)

    def job_spec(self) -> dict[str, Any]:
        """Return the spec of the job."""
        return changed(JOB["spec"], self.job)


def changed(spec: Mapping[str, Any], changes: Mapping[tuple[Step, ...], Any]) -> dict[str, Any]:
    """Return a spec with values changed, added or taken out."""
    result: dict[str, Any] = copy.deepcopy(dict(spec))
    for (*parents, last), value in changes.items():
        node: Any = result
        for step in parents:
            node = node.setdefault(step, {}) if isinstance(node, dict) else node[step]
        if value is GONE:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return result


BAD_TEMPLATES = (
    BadTemplate("what a job learns", {("template", "trainer"): {"totalSteps": 10}},
                "spec.template.trainer", "no such field"),
    BadTemplate("a model", {("template", "model"): {"actor": {"path": "/data/model"}}},
                "spec.template.model", "no such field"),
    BadTemplate("an order to stop", {("template", "runPolicy", "suspend"): True},
                "spec.template.runPolicy.suspend", "no such field"),
    BadTemplate("another template", {("template", "templateRef"): {"name": "other"}},
                "spec.template.templateRef", "no such field"),
    BadTemplate("a wrong name of a field", {("template", "runPolicy", "backOffLimit"): 3},
                "spec.template.runPolicy.backOffLimit", "no such field"),
    BadTemplate("an image with a space", {("template", "image"): "trainer :1"},
                "spec.template.image", "must be the name of an image"),
    BadTemplate("a number as text", {("template", "runPolicy", "backoffLimit"): "3"},
                "spec.template.runPolicy.backoffLimit", "valid integer"),
    BadTemplate("memory that is not a quantity", {("poolDefaults", "resourcesPerGPU"): {"memory": "64 gigabytes"}},
                "spec.poolDefaults.resourcesPerGPU.memory", "must be a quantity"),
    BadTemplate("a name for every pool", {("poolDefaults", "name"): "actor"},
                "spec.poolDefaults.name", "no such field"),
    BadTemplate("a pool without a name", {("template", "pools", 0, "name"): GONE},
                "spec.template.pools[0].name", "required"),
    BadTemplate("eight pools", {("template", "pools"): [{"name": f"p{i}"} for i in range(8)]},
                "spec.template.pools", "at most 7 items"),
    BadTemplate("no GPUs allowed", {("limits", "maxGPUs"): 0},
                "spec.limits.maxGPUs", "greater than or equal to 1"),
    BadTemplate("a limit that there is not", {("limits", "maxNodes"): 2},
                "spec.limits.maxNodes", "no such field"),
)  # fmt: skip

BAD_TOGETHER = (
    BadTogether("no image anywhere", {("template", "image"): GONE}, {}, "spec.image", "required"),
    BadTogether("no storage anywhere", {("template", "storage"): GONE}, {}, "spec.storage", "required"),
    BadTogether("no pools anywhere", {("template", "pools"): GONE}, {}, "spec.pools", "required"),
    BadTogether("a pool that only the job knows, without GPUs", {},
                {("pools",): [{"name": "h100"}], ("placement",): GONE}, "spec.pools[0].gpusPerNode", "required"),
    BadTogether("GPUs of the template that the job's sizes do not divide", {("template", "pools", 0, "gpusPerNode"): 3},
                {("rollout",): {"tensorParallelSize": 2}}, "spec.rollout.tensorParallelSize",
                "does not divide the 3 GPUs of a node of pool actor"),
    BadTogether("bounds of the template", {("template", "pools", 0, "maxNodes"): 2},
                {("pools",): [{"name": "actor", "nodes": 3}, {"name": "critic"}]},
                "spec.pools[0].maxNodes", "is below nodes, which is 3", is_of_the_template=True),
    BadTogether("a port of Ray", {("template", "telemetry"): {"prometheusPort": 8265}}, {},
                "spec.telemetry.prometheusPort", "Ray's own", is_of_the_template=True),
    BadTogether("a queue of the template that no gang scheduler reads",
                {("template", "runPolicy", "gangSchedulerQueue"): "a"}, {},
                "spec.runPolicy.gangSchedulerQueue", "set gangScheduler", is_of_the_template=True),
    BadTogether("the second pool of the template, after one of the job", {("template", "pools", 1, "minNodes"): 2},
                {("pools",): [{"name": "critic"}, {"name": "actor"}]},
                "spec.pools[0].minNodes", "is above nodes", is_of_the_template=True),
    BadTogether("more GPUs than allowed", {}, {("pools",): [{"name": "actor", "nodes": 4}, {"name": "critic"}]},
                "spec.pools", "PPOJobTemplate gpus allows 8 GPUs"),
    BadTogether("more GPUs than allowed, after autoBalance", {},
                {("pools",): [{"name": "actor", "maxNodes": 4}, {"name": "critic"}]},
                "spec.pools", "PPOJobTemplate gpus allows 8 GPUs"),
    BadTogether("a longer deadline than allowed", {}, {("runPolicy",): {"activeDeadlineSeconds": 3601}},
                "spec.runPolicy.activeDeadlineSeconds", "PPOJobTemplate gpus allows 3600 s"),
)  # fmt: skip
