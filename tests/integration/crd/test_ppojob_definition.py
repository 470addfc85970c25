"""CRD and policy of PPOJob on the real API server: accepted, defaulted, and refused where it must be."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppojob_api.v1alpha1.fixed import IMMUTABLE, MUTABLE
from ppojob_api.v1alpha1.merging import merged
from ppojob_api.v1alpha1.templates import TEMPLATED
from ppojob_api.v1alpha1.validation import parse_spec
from tests.bad_specs import BAD_SPECS, GOOD, BadSpec
from tests.examples import EXAMPLES, name_of
from tests.integration.conftest import POLICY_DENIED
from tests.integration.crd.server_words import OTHER_WORDS

ACCEPTED = {
    "type": "Accepted",
    "status": "True",
    "reason": "Valid",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "observedGeneration": 1,
}

TRAINED: dict[str, Any] = {
    "gradientCheckpointing": False,
    "compile": True,
    "offload": {"optimizer": True},
    "activationOffload": True,
    "reshardAfterForward": True,
}
"""New values of the settings of a trained model."""

CHANGES: dict[str, Any] = {
    "templateRef": {"name": "gpus"},
    "image": "trainer:2",
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccountName": "another",
    "env": [{"name": "A", "value": "2"}],
    "envFrom": [{"secretRef": {"name": "more"}}],
    "model": {"actor": {"path": "/data/another"}},
    **{f"model.{role}.{field}": value for role in ("actor", "critic") for field, value in TRAINED.items()},
    **{f"model.ref.{field}": TRAINED[field] for field in ("compile", "reshardAfterForward")},
    "model.ref.offload": {"parameters": True},
    "model.reward.maxTokensPerGPU": 512,
    "data": {"train": {"reasoningGym": {"config": {"min_terms": 5}}}},
    "reward": {"function": {"extract": "last_number"}},
    "algorithm": {"gamma": 0.5},
    "actor": {"learningRate": 1.0e-3},
    "actor.maxTokensPerGPU": 4096,
    "actor.tensorParallelSize": 2,
    "actor.sequenceParallelSize": 2,
    "actor.pipelineParallelSize": 2,
    "actor.virtualPipelineParallelSize": 2,
    "actor.expertParallelSize": 2,
    "actor.fsdpSize": 1,
    "critic": {"learningRate": 1.0e-3},
    "critic.maxTokensPerGPU": 4096,
    "critic.tensorParallelSize": 2,
    "critic.sequenceParallelSize": 2,
    "critic.pipelineParallelSize": 2,
    "critic.virtualPipelineParallelSize": 2,
    "critic.expertParallelSize": 2,
    "critic.fsdpSize": 1,
    "rollout": {"temperature": 0.5},
    "rollout.tensorParallelSize": 2,
    "rollout.pipelineParallelSize": 2,
    "rollout.gpuMemoryUtilization": 0.3,
    "rollout.maxNumSeqs": 64,
    "rollout.maxNumBatchedTokens": 2048,
    "rollout.enableChunkedPrefill": False,
    "rollout.enablePrefixCaching": False,
    "rollout.enforceEager": True,
    "rollout.enableExpertParallel": True,
    "rollout.logProbs": False,
    "rollout.sleep": False,
    "rollout.cpuCacheGib": 2,
    "rollout.speculative": {"numSpeculativeTokens": 2},
    "rollout.engineArgs": {"block_size": 32},
    "workers": [
        {
            "name": "extra",
            "module": "extra",
            "className": "Extra",
            "pool": "actor",
            "hooks": [{"after": "Step", "method": "measure"}],
        }
    ],
    "device": "CPU",
    "pools": [{"name": "actor", "gpusPerNode": 4}, {"name": "critic", "gpusPerNode": 1}],
    "head": {"podTemplate": {"spec": {"priorityClassName": "other"}}},
    "placement": {"critic": "actor"},
    "schedule": {"mode": "Serial"},
    "storage": {"claimName": "another"},
    "telemetry": {"samplesPerStep": 1},
    "checkpoint.path": "s3://bucket/job",
    "checkpoint.async": True,
    "checkpoint.resume": "Never",
    "checkpoint.resumeFrom": "/data/checkpoint",
    "checkpoint.export": "Never",
    "checkpoint.exportTo": "s3://bucket/models",
    "trainer.seed": 7,
    "trainer.validateBeforeTraining": False,
    "trainer.dataWorkers": 2,
    "trainer.phaseTimeoutSeconds": 60,
    "runPolicy.queueName": "another",
    "runPolicy.queuePriorityClass": "higher",
    "runPolicy.gangScheduler": "Volcano",
    "runPolicy.gangSchedulerQueue": "another",
    "autoBalance": {"enabled": True},
    "runPolicy": {
        "suspend": True,
        "backoffLimit": 7,
        "activeDeadlineSeconds": 100,
        "failurePolicy": {"rules": [{"reasons": ["Preempted"], "exitCodes": [7], "action": "Retry"}]},
    },
    "checkpoint.everySteps": 3,
    "checkpoint.keep": 5,
    "trainer.totalSteps": 500,
    "trainer.totalEpochs": 3,
    "trainer.validateEverySteps": 0,
}
"""A new value for each part of a spec that may or may not change."""

ALSO: dict[str, dict[str, Any]] = {
    **{f"{role}.virtualPipelineParallelSize": {role: {"pipelineParallelSize": 2}} for role in ("actor", "critic")},
    "rollout.enableExpertParallel": {"rollout": {"tensorParallelSize": 2}},
}
"""What a change needs beside itself, by its part."""


def job(name: str, **spec: Any) -> dict[str, Any]:
    manifest = copy.deepcopy(GOOD)
    manifest["metadata"]["name"] = name
    manifest["spec"]["pools"][1]["gpusPerNode"] = 2
    queue = {"queueName": "gpus", "queuePriorityClass": "low", "gangScheduler": "KAI", "gangSchedulerQueue": "team"}
    manifest["spec"]["model"]["reward"] = {"path": "/data/rm"}
    manifest["spec"]["reward"]["type"] = "Both"
    manifest["spec"] |= {"head": {"podTemplate": {"spec": {"priorityClassName": "one"}}}, "runPolicy": queue, **spec}
    return manifest


def change(kubectl: Any, name: str, part: str) -> tuple[bool, str]:
    """Try to change one part of a spec; return whether it would be accepted, and the message."""
    value = CHANGES[part]
    for key in reversed(part.split(".")):
        value = {key: value}
    patch = f"--patch={json.dumps({'spec': merged(value, ALSO.get(part, {}))})}"
    done = kubectl.run("patch", "ppojob", name, "--type=merge", "--dry-run=server", patch)
    return done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def accepted(kubectl: Any) -> str:
    """The name of a job that the operator accepted."""
    kubectl.create(job("accepted"))
    patch = json.dumps({"status": {"conditions": [ACCEPTED]}})
    kubectl("patch", "ppojob", "accepted", "--subresource=status", "--type=merge", f"--patch={patch}")
    return "accepted"


def test_the_api_server_takes_the_definition_as_it_is(cluster: Any) -> None:
    """A rule whose cost is too high, or a schema that is not structural, is reported here."""
    conditions = cluster.json("get", "crd", "ppojobs.ppojob.dev")["status"]["conditions"]

    assert {c["type"]: c["status"] for c in conditions} == {"NamesAccepted": "True", "Established": "True"}


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_every_example_is_taken_without_a_warning(kubectl: Any, path: Path) -> None:
    done = kubectl.run("apply", "--validate=strict", "--dry-run=server", f"--filename={path}")

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("bad", BAD_SPECS, ids=lambda bad: bad.name)
def test_kubectl_apply_refuses_a_bad_spec_and_names_the_field(kubectl: Any, bad: BadSpec) -> None:
    done = kubectl.apply(bad.manifest())

    assert (done.returncode != 0) == bad.server_refuses, done.stdout
    if bad.server_refuses:
        assert OTHER_WORDS.get(bad.name, bad.path) in done.stderr
    else:
        kubectl("delete", "ppojob", "good")


def test_a_negative_number_as_a_quantity_is_refused(kubectl: Any) -> None:
    bad = job("negative", pools=[{"name": "actor", "gpusPerNode": 1, "resourcesPerGPU": {"cpu": -1}}])
    bad["spec"]["placement"] = {"actor": "actor"}

    assert "spec.pools[0].resourcesPerGPU.cpu: Invalid value: -1" in kubectl.apply(bad).stderr


def test_other_clients_are_warned_of_an_unknown_field_that_is_then_dropped(kubectl: Any) -> None:
    done = kubectl.apply(job("warned", rewards={}), validate="warn")

    assert 'Warning: unknown field "spec.rewards"' in done.stderr
    assert "rewards" not in kubectl.json("get", "ppojob", "warned")["spec"]


def test_the_defaults_that_the_api_server_fills_in_are_those_of_the_model(kubectl: Any) -> None:
    stored = kubectl.create(job("defaults"))["spec"]

    assert stored["checkpoint"] == {
        "async": True,
        "everySteps": 50,
        "export": "Final",
        "keep": 2,
        "resume": "Auto",
    }
    # A template may have them, and a stored default would take precedence over it.
    assert stored["pools"][0] == {"name": "actor", "gpusPerNode": 2, "network": {}, "resourcesPerGPU": {}}
    assert stored["rollout"]["validation"]["temperature"] == 0
    assert "gpuResourceName" not in stored["pools"][0]
    assert parse_spec(stored) == parse_spec(job("defaults")["spec"])
    # And nothing that the model fills in is left to the reader of the object, but for lists and maps that are empty.
    wire = parse_spec(job("defaults")["spec"]).to_wire()
    filled_in, wanted = ({k: v for k, v in spec.items() if k not in TEMPLATED} for spec in (stored, wire))
    assert _without_empty(filled_in) == _without_empty(wanted)


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        cleaned = {name: _without_empty(part) for name, part in value.items()}
        return {name: part for name, part in cleaned.items() if part not in ({}, [])}
    return [_without_empty(part) for part in value] if isinstance(value, list) else value


def test_the_table_of_changes_knows_every_part_of_a_spec() -> None:
    assert set(CHANGES) == {*MUTABLE, *IMMUTABLE}


@pytest.mark.parametrize("part", IMMUTABLE)
def test_what_may_not_change_is_refused_once_the_job_is_accepted(kubectl: Any, accepted: str, part: str) -> None:
    is_taken, words = change(kubectl, accepted, part)

    assert not is_taken
    assert f"{POLICY_DENIED}spec.{part}: " in words
    assert "cannot change once the job is accepted: create another PPOJob with the new value" in words


def test_a_default_that_an_earlier_version_has_stored_may_be_left_out(kubectl: Any) -> None:
    earlier = {"storage": {"claimName": "ppojob-data", "mountPath": "/data"}, "telemetry": {"samplesPerStep": 4}}
    kubectl.create(job("earlier", **earlier, runPolicy={"gangScheduler": "None"}))
    patch = json.dumps({"status": {"conditions": [ACCEPTED]}})
    kubectl("patch", "ppojob", "earlier", "--subresource=status", "--type=merge", f"--patch={patch}")

    done = kubectl.run("replace", "--filename=-", stdin=json.dumps(job("earlier", runPolicy={})))
    assert (done.returncode, done.stderr) == (0, "")
    other = job("earlier", runPolicy={}, storage={"claimName": "ppojob-data", "mountPath": "/mnt"})
    assert "spec.storage: " in kubectl.run("replace", "--filename=-", stdin=json.dumps(other)).stderr


def test_whether_a_job_is_on_policy_may_not_change_once_it_is_accepted(kubectl: Any, accepted: str) -> None:
    patch = json.dumps({"spec": {"schedule": {"mode": "OneStepOff"}}})
    done = kubectl.run("patch", "ppojob", accepted, "--type=merge", "--dry-run=server", f"--patch={patch}")

    assert done.returncode != 0
    assert "a change from or to mode OneStepOff, or of its maxStaleness or weightUpdates, would change" in done.stderr


@pytest.mark.parametrize("part", MUTABLE)
def test_what_may_change_is_taken_while_the_job_runs(kubectl: Any, accepted: str, part: str) -> None:
    assert change(kubectl, accepted, part) == (True, "")


def test_everything_may_change_before_the_job_is_accepted(kubectl: Any) -> None:
    kubectl.create(job("fresh"))

    assert {part: change(kubectl, "fresh", part) for part in CHANGES} == dict.fromkeys(CHANGES, (True, ""))


def test_a_refused_spec_can_be_corrected(kubectl: Any) -> None:
    kubectl.create(job("refused"))
    refused = ACCEPTED | {"status": "False", "reason": "InvalidSpec"}
    patch = json.dumps({"status": {"conditions": [refused]}})
    kubectl("patch", "ppojob", "refused", "--subresource=status", "--type=merge", f"--patch={patch}")

    assert change(kubectl, "refused", "image") == (True, "")


def test_kubectl_get_shows_where_the_job_is(kubectl: Any) -> None:
    kubectl.create(job("columns"))
    status = {
        "phase": "Running",
        "ready": "3/3",
        "retries": {"user": 1, "infrastructure": 1, "total": 2},
        "progress": {"step": 12, "totalSteps": 100, "percentage": 12, "reward": "0.41"},
    }
    patch = json.dumps({"status": status})
    kubectl("patch", "ppo", "columns", "--subresource=status", "--type=merge", f"--patch={patch}")

    header, row = kubectl("get", "ppo", "columns").splitlines()

    assert header.split() == ["NAME", "PHASE", "STEP", "PROGRESS", "REWARD", "READY", "RETRIES", "AGE"]
    assert row.split()[:-1] == ["columns", "Running", "12", "12", "0.41", "3/3", "2"]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (
            "ppojob",
            ["KIND:       PPOJob", "PPOJob trains a language model with PPO", "spec\t<Object> -required-"],
        ),
        ("ppojob.spec.pools", ["GPUs of one kind: nodes x gpusPerNode.", "Number of Ray worker pods."]),
        ("ppojob.spec.image", ["Required, here"]),
        ("ppojob.spec.placement.critic", ["Pool of the critic, with an estimator that needs one."]),
        ("ppojob.spec.schedule.mode", ["ENUM:", "ParallelUpdate", "Serial: one phase after the other"]),
        ("ppojob.spec.checkpoint.everySteps", ["Steps between checkpoints; 0: only the last one."]),
        ("ppojob.status.conditions", ["metav1.Condition"]),
    ],
)
def test_kubectl_explain_reads_well(kubectl: Any, field: str, words: list[str]) -> None:
    text = kubectl("explain", field)

    assert [word for word in words if word not in text] == [], text


def test_every_field_has_a_description(cluster: Any) -> None:
    version = cluster.json("get", "crd", "ppojobs.ppojob.dev")["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    missing = [path for part in ("spec", "status") for path in _undescribed(schema[part], part)]

    assert missing == []


def _undescribed(schema: dict[str, Any], path: str) -> list[str]:
    found = [] if schema.get("description") else [path]
    for name, part in schema.get("properties", {}).items():
        found += _undescribed(part, f"{path}.{name}")
    items = schema.get("items", {})
    return found + [
        p for name, part in items.get("properties", {}).items() for p in _undescribed(part, f"{path}[].{name}")
    ]


def test_the_rules_leave_room_in_the_budget_of_cost(kubectl: Any) -> None:
    """The largest spec that the bounds allow in what the rules look at is checked within the API server's limit."""
    pools = [{"name": f"p{n}", "gpusPerNode": 64, "nodes": 4096} for n in range(7)]
    names = [pool["name"] for pool in pools]
    largest = job(
        "largest",
        pools=pools,
        placement={"actor": "p6", "critic": "p6", "rollout": names, "ref": names, "reward": names},
    )
    largest["spec"]["env"] = [{"name": f"V{n}", "value": "x" * 1000} for n in range(128)]

    assert kubectl.run("create", "--filename=-", stdin=yaml.safe_dump(largest)).returncode == 0
    done = kubectl.run("patch", "ppojob", "largest", "--type=merge", '--patch={"spec":{"trainer":{"totalSteps":7}}}')
    assert done.returncode == 0, done.stderr
