"""Settings of a valid spec that cause a warning, one each, and settings that do not."""

from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec_warnings import spec_warnings
from ppojob_api.v1alpha1.validation import parse_manifest
from tests.bad_specs import GOOD, with_changes
from tests.examples import EXAMPLES, name_of, spec_of

POOL = {"name": "actor", "gpusPerNode": 2, "nodes": 2}
CRITIC = {"name": "critic", "gpusPerNode": 2, "nodes": 1}
OFF = {
    "schedule": {"mode": "OneStepOff"},
    "algorithm": {"rolloutCorrection": {"method": "None"}},
    "pools": [{"name": name, "gpusPerNode": 1} for name in ("actor", "critic", "rollout")],
    "placement": {"actor": "actor", "critic": "critic", "rollout": ["rollout"]},
}
GPU = "nvidia.com/gpu.product"
SIX = {"miniBatchSize": 8}
"""Minibatches that six GPUs divide."""
TWO_NODES = {**POOL, "gpusPerNode": 4, "nodeSelector": {GPU: "H200"}}
SMALL = {**CRITIC, "nodes": 2, "nodeSelector": {GPU: "H200"}}
"""Two nodes of two GPUs."""
WITH_REFERENCE = {"algorithm": {"kl": {"inReward": True}}}


def among(*products: str) -> dict[str, Any]:
    """Return a pod template that wants nodes with one of these GPUs."""
    terms = [{"matchExpressions": [{"key": GPU, "operator": "In", "values": list(products)}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"spec": {"affinity": {"nodeAffinity": required}}}


def said_of(spec: dict[str, Any]) -> list[str]:
    _, _, parsed = parse_manifest(with_changes({("spec", name): value for name, value in spec.items()}))
    return list(map(str, spec_warnings(resolve(parsed))))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"checkpoint": {"everySteps": 0}}, "spec.checkpoint.everySteps: 0: no checkpoint is saved before the end"),
        ({"image": "trainer"}, "spec.image: 'trainer': this tag is mutable"),
        ({"image": "registry:5000/trainer:latest"}, "spec.image: 'registry:5000/trainer:latest': this tag is mutable"),
        (
            {"reward": {"function": {"module": "r", "timeoutSeconds": 1800}}},
            "spec.reward.function.timeoutSeconds: 1800: trainer.phaseTimeoutSeconds (1800) ends the phase first",
        ),
        (
            {"algorithm": {"policyLoss": "GSPO"}},
            "spec.actor.clipRatioHigh: 0.2: GSPO's ratio is a mean over a response's tokens",
        ),
        ({"autoBalance": {"enabled": True}}, "spec.autoBalance.enabled: True: no pool can be resized"),
        (
            {"autoBalance": {"enabled": True}, "runPolicy": {"queueName": "gpus"}},
            "spec.autoBalance.enabled: True: autoBalance does not resize pools of a job in a queue",
        ),
        (
            {"pools": [{**POOL, "topology": {"required": "rack"}}, CRITIC], "device": "CPU"},
            "spec.pools[0].topology: {'required': 'rack'}: only Kueue reads it, and the job names no queue",
        ),
        (
            {"pools": [POOL, CRITIC]},
            "spec.pools[0].nodeSelector: no node selector chooses the kind of GPU for the 2 pods",
        ),
        (
            OFF,
            "spec.schedule.mode: 'OneStepOff': this job is not trained on-policy: responses come from weights up to 1",
        ),
        (
            {**OFF, "schedule": {"mode": "OneStepOff", "maxStaleness": 4}},
            "spec.schedule.mode: 'OneStepOff': this job is not trained on-policy: responses come from weights up to 4",
        ),
        (
            {"pools": [{**POOL, "nodes": 3, "nodeSelector": {GPU: "H200"}}, CRITIC], "actor": {**SIX, "fsdpSize": 3}},
            "spec.actor.fsdpSize: 3: a copy of the model has 3 GPUs, and nodes of pool actor have 2",
        ),
        (
            {
                "pools": [{**POOL, "nodes": 3, "nodeSelector": {GPU: "H200"}}, CRITIC],
                "actor": {**SIX, "fsdpSize": 3, "pipelineParallelSize": 2},
            },
            "spec.actor.fsdpSize: 3: a copy of a pipeline stage has 3 GPUs, and nodes of pool actor have 2",
        ),
        (
            {"pools": [TWO_NODES, CRITIC], "actor": {"miniBatchSize": 8, "expertParallelSize": 8}},
            "spec.actor.expertParallelSize: 8: nodes of pool actor have 4 GPUs, so groups of 8 span nodes and exchange "
            "tokens over the network twice in each layer with experts: if GPU memory allows, set it to 4",
        ),
        (
            {
                "pools": [{**POOL, "nodes": 3, "nodeSelector": {GPU: "H200"}}, CRITIC],
                "actor": {**SIX, "expertParallelSize": 3},
            },
            "spec.actor.expertParallelSize: 3: nodes of pool actor have 2 GPUs, so groups of 3 span nodes and exchange "
            "tokens over the network twice in each layer with experts: if GPU memory allows, remove the field",
        ),
        (
            {"pools": [TWO_NODES, SMALL], "critic": {"miniBatchSize": 8, "expertParallelSize": 4}},
            "spec.critic.expertParallelSize: 4: nodes of pool critic have 2 GPUs, so groups of 4 span nodes and "
            "exchange tokens over the network twice in each layer with experts: if GPU memory allows, set it to 2",
        ),
        (
            {
                "pools": [TWO_NODES, SMALL],
                "actor": {"miniBatchSize": 8, "expertParallelSize": 4},
                **WITH_REFERENCE,
            },
            "spec.actor.expertParallelSize: 4: the reference is divided like the actor, and nodes of pool critic have "
            "2 GPUs, so groups of 4 span nodes and exchange tokens over the network twice in each layer with experts: "
            "if GPU memory allows, set placement.ref to [actor], or set it to 2",
        ),
        (
            {
                # One warning for a field, though the reference's groups span nodes too.
                "pools": [{**TWO_NODES, "nodes": 4}, {**SMALL, "nodes": 4}],
                "actor": {"miniBatchSize": 16, "expertParallelSize": 8},
                **WITH_REFERENCE,
            },
            "spec.actor.expertParallelSize: 8: nodes of pool actor have 4 GPUs, so groups of 8 span nodes",
        ),
        (
            {"pools": [{**POOL, "podTemplate": among("H200", "A100")}, CRITIC]},
            "spec.pools[0].podTemplate.spec.affinity.nodeAffinity: ['H200', 'A100']: the pool may get several kinds",
        ),
    ],
)
def test_a_warning_has_path_value_and_remedy(spec: dict[str, Any], words: str) -> None:
    [warning] = said_of(spec)

    assert warning.startswith(words)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"image": "registry:5000/trainer:1.2"},
        {"image": f"trainer@sha256:{'0' * 64}"},
        {"image": f"trainer:latest@sha256:{'0' * 64}"},
        {"checkpoint": {"everySteps": 1}},
        {"algorithm": {"policyLoss": "GSPO"}, "actor": {"clipRatioHigh": 4.0e-4, "miniBatchSize": 4}},
        {"pools": [{**POOL, "nodeSelector": {GPU: "H200"}}, CRITIC]},
        {"pools": [{**POOL, "podTemplate": among("H200")}, CRITIC]},
        {"pools": [{**POOL, "podTemplate": {"spec": {"nodeSelector": {GPU: "H200"}}}}, CRITIC]},
        {"pools": [{**POOL, "gpusPerNode": 1, "gpuResourceName": "nvidia.com/mig-1g.10gb"}, CRITIC]},
        {"pools": [{**POOL, "nodes": 3, "nodeSelector": {GPU: "H200"}}, CRITIC], "actor": {**SIX, "fsdpSize": 1}},
        {"pools": [{**POOL, "nodes": 3, "nodeSelector": {GPU: "H200"}}, CRITIC], "actor": {**SIX, "fsdpSize": 2}},
        {"pools": [{**POOL, "nodes": 3, "nodeSelector": {GPU: "H200"}}, CRITIC], "actor": {**SIX, "fsdpSize": 6}},
        {
            "pools": [{**POOL, "nodes": 3, "nodeSelector": {GPU: "H200"}}, CRITIC],
            "actor": {**SIX, "fsdpSize": 1, "pipelineParallelSize": 3},
        },
        {"pools": [TWO_NODES, CRITIC], "actor": {"miniBatchSize": 8, "expertParallelSize": 4}},
        {"pools": [TWO_NODES, CRITIC], "actor": {"miniBatchSize": 8, "expertParallelSize": 2, "fsdpSize": 2}},
        {
            "pools": [TWO_NODES, SMALL],
            "actor": {"miniBatchSize": 8, "expertParallelSize": 2},
            "critic": {"miniBatchSize": 8, "expertParallelSize": 2},
            **WITH_REFERENCE,
        },
        {"pools": [POOL, CRITIC], "device": "CPU"},
        {
            "pools": [{**POOL, "topology": {"required": "rack"}}, CRITIC],
            "device": "CPU",
            "runPolicy": {"queueName": "gpus"},
        },
        {"autoBalance": {"enabled": True}, "device": "CPU", "pools": [{**POOL, "maxNodes": 3}, CRITIC]},
        {"pools": [{**POOL, "podTemplate": {"spec": {"affinity": "none", "nodeSelector": {"a": "b"}}}}, CRITIC]},
    ],
)
def test_intended_values_give_no_warning(spec: dict[str, Any]) -> None:
    assert said_of(spec) == []


def test_a_template_that_makes_no_sense_is_left_to_those_who_refuse_it() -> None:
    for affinity in (
        "none",
        {"nodeAffinity": 1},
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
    ):
        pool = {**POOL, "podTemplate": {"spec": {"affinity": affinity}}}

        assert [warning.partition(": ")[0] for warning in said_of({"pools": [pool, CRITIC]})] == [
            "spec.pools[0].nodeSelector"
        ]


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_the_examples_give_no_warning_but_for_missing_checkpoints(path: Path) -> None:
    """Those that run for minutes write none, so that their times are those of the steps. One has a mode that warns."""
    expected = {"spec.checkpoint.everySteps"}
    if path.name == "one-step-off.yaml":
        expected.add("spec.schedule.mode")
    assert {warning.path for warning in spec_warnings(resolve(spec_of(path)))} <= expected


def test_the_table_begins_from_a_spec_without_warnings() -> None:
    assert list(spec_warnings(resolve(parse_manifest(GOOD)[2]))) == []


def test_weights_that_change_in_flight_have_a_warning_beside_that_of_the_mode() -> None:
    first, second = said_of({**OFF, "schedule": {"mode": "OneStepOff", "weightUpdates": "InFlight"}})

    assert first.startswith("spec.schedule.mode: 'OneStepOff': this job is not trained on-policy")
    assert second.startswith(
        "spec.schedule.weightUpdates: 'InFlight': which weights sample a token depends on measured"
    )
