"""Other settings of a job: gradient checkpointing off with the largest passes that fit, or on if the job is too large;
and without offload, if it fits.

Without checkpointing, the made-up activations take ten times the memory: 10 MB for a token of a pass.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from ppojob_trainer.cli import app
from ppojob_trainer.commands.manifest import load
from ppojob_trainer.planning import Plan, plan_job
from ppojob_trainer.planning.gpus import Gpu
from ppojob_trainer.planning.measured_once import measured_once
from ppojob_trainer.planning.plan import Runner
from ppojob_trainer.planning.report import as_json, as_text
from ppojob_trainer.planning.settings import ChangedPlan, plan_other_settings
from ppojob_trainer.planning.work import Measured, Work
from tests.unit.trainer.planning.jobs import raw_job, write_config
from tests.unit.trainer.planning.measured import let_commands_share
from tests.unit.trainer.planning.stubs import H200, MB, stub

ACTOR, CRITIC = "model.actor.gradientCheckpointing", "model.critic.gradientCheckpointing"
TOKENS = {"actor": "actor.maxTokensPerGPU", "critic": "critic.maxTokensPerGPU"}
LARGE = {"trainBatchSize": 512, "maxPromptLength": 64, "maxResponseLength": 64}
PASSES = {"miniBatchSize": 512, "maxTokensPerGPU": 16384}
OFF = {"gradientCheckpointing": False}


def activations(work: Work) -> Measured:
    """Return the made-up memory of a role, with activations in proportion to the tokens of a pass."""
    found = stub(work)
    tokens = work.update_sequences * (work.prompt_tokens + work.response_tokens) // work.dims.slices
    per_token = 1 * MB if work.options.gradient_checkpointing else 10 * MB
    return replace(found, update=found.update + per_token * tokens, layer_parameters=1e9)


def write_job(folder: Path, **sections: Any) -> Path:
    """Write a job whose passes can be made smaller: 256 sequences of 128 tokens for each of two GPUs."""
    config = write_config(folder / "model", max_position_embeddings=16384)
    sections["model"] = {"actor": {"path": config}} | sections.get("model", {})
    sections["model"]["actor"]["path"] = config
    spec = raw_job(config, **{"data": LARGE, "actor": PASSES, "critic": PASSES} | sections)
    job = {"apiVersion": "ppojob.dev/v1alpha1", "kind": "PPOJob", "metadata": {"name": "planned"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def planned(file: Path, gpu: Gpu = H200, runner: Runner = activations) -> tuple[Plan, list[ChangedPlan]]:
    """Return the plan of the job as it is, and of the other settings."""
    spec = load(file).spec
    gpus = {pool.name: gpu for pool in spec.pools}
    job = plan_job(spec, gpus, runner=runner)
    return job, list(plan_other_settings(job, gpus, runner=runner))


def changes(plans: Sequence[ChangedPlan]) -> list[dict[str, bool | int]]:
    return [dict(one.changes) for one in plans]


def test_without_checkpointing_passes_are_the_largest_that_fit(tmp_path: Path) -> None:
    """16384 tokens need 164 GB. Both roles fit with 41 GB each; one with 82 GB, beside 16 GB of the other."""
    job, found = planned(write_job(tmp_path))

    assert job.verdict == "fits"
    assert changes(found) == [
        {ACTOR: False, TOKENS["actor"]: 8192},
        {CRITIC: False, TOKENS["critic"]: 8192},
        {ACTOR: False, CRITIC: False, TOKENS["actor"]: 4096, TOKENS["critic"]: 4096},
    ]
    assert [one.plan.verdict for one in found] == ["fits"] * 3
    (pool,) = found[0].plan.pools
    assert pool.memory.training == 70 * MB + 10 * MB * 8192 + 80 * MB + 1 * MB * 16384 + 9 * MB


def test_passes_stay_as_large_as_they_are_if_they_fit(tmp_path: Path) -> None:
    _, found = planned(write_job(tmp_path, actor=PASSES | {"maxTokensPerGPU": 8192}))
    assert changes(found)[0] == {ACTOR: False}


def test_a_close_plan_is_not_proposed(tmp_path: Path) -> None:
    """The actor with 8192 tokens would need 107 GB with 9 GB of processes."""
    spacious, close = (
        changes(planned(write_job(tmp_path), replace(H200, memory=size))[1])[0] for size in (126e9, 121e9)
    )
    assert spacious == {ACTOR: False, TOKENS["actor"]: 8192}
    assert close == {ACTOR: False, TOKENS["actor"]: 4096}


@pytest.mark.parametrize(
    ("length", "slices", "tokens", "tried"),
    [
        # No less than 4096, and no less than now.
        (128, 1, 16384, [16384, 8192, 4096]),
        (128, 1, 10000, [10000, 5000, 4096]),
        (128, 1, 3000, [3000]),
        # The longest sequence; a group of two ranks has twice the tokens.
        (6000, 1, 20000, [20000, 10000, 6000]),
        (12000, 2, 20000, [20000, 10000, 6000]),
    ],
)
def test_passes_have_a_smallest_size(tmp_path: Path, length: int, slices: int, tokens: int, tried: list[int]) -> None:
    batch = 512 if length == 128 else 16
    data = {"trainBatchSize": batch, "maxPromptLength": 64, "maxResponseLength": length - 64}
    training = {"miniBatchSize": batch, "maxTokensPerGPU": tokens, "sequenceParallelSize": slices}
    limits: list[int] = []

    def too_large(work: Work) -> Measured:
        if work.kind == "actor" and not work.options.gradient_checkpointing:
            assert work.training is not None
            limits.append(work.training.max_tokens_per_gpu)
            return replace(stub(work), update=10**12)
        return stub(work)

    _, found = planned(write_job(tmp_path, data=data, actor=training, critic=training), runner=too_large)

    assert changes(found) == [{CRITIC: False}]
    # For the actor alone, and for both roles.
    assert limits == tried * 2


def test_passes_are_smaller_only_in_pools_that_are_full(tmp_path: Path) -> None:
    pools = [{"name": "a", "gpusPerNode": 2}, {"name": "c", "gpusPerNode": 2}]
    placement = {"actor": "a", "critic": "c", "ref": ["c"], "reward": ["c"]}
    critic = PASSES | {"maxTokensPerGPU": 10000}

    _, found = planned(write_job(tmp_path, pools=pools, placement=placement, critic=critic))

    assert changes(found)[2] == {ACTOR: False, CRITIC: False, TOKENS["actor"]: 8192}


def test_a_full_pool_without_the_changed_role_ends_the_search(tmp_path: Path) -> None:
    pools = [{"name": "a", "gpusPerNode": 2}, {"name": "c", "gpusPerNode": 2}]
    placement = {"actor": "a", "critic": "c", "ref": ["c"], "reward": ["c"]}
    critic = PASSES | {"maxTokensPerGPU": 4096}
    file = write_job(tmp_path, pools=pools, placement=placement, critic=critic, model={"critic": OFF})

    job, found = planned(file, replace(H200, memory=40e9))

    assert (job.verdict, job.pools[0].verdict) == ("does not fit", "fits")
    assert changes(found) == [{CRITIC: True}]


def test_offloaded_activations_need_checkpointing(tmp_path: Path) -> None:
    _, found = planned(write_job(tmp_path, model={"actor": {"activationOffload": True}}))
    assert changes(found)[0] == {
        ACTOR: False,
        "model.actor.activationOffload": False,
        TOKENS["actor"]: 8192,
    }


@pytest.mark.parametrize(
    ("size", "verdict", "proposed"),
    [
        # Both need 164 GB without checkpointing and 16 GB with it.
        (H200.memory, "does not fit", [{ACTOR: True}, {CRITIC: True}, {ACTOR: True, CRITIC: True}]),
        (350e9, "close", [{ACTOR: True}, {CRITIC: True}, {ACTOR: True, CRITIC: True}]),
        (400e9, "fits", []),
    ],
)
def test_a_job_that_is_too_large_may_checkpoint(
    tmp_path: Path, size: float, verdict: str, proposed: list[dict[str, bool]]
) -> None:
    model = {"actor": dict(OFF), "critic": OFF}
    job, found = planned(write_job(tmp_path, model=model), replace(H200, memory=size))

    assert job.verdict == verdict
    assert changes(found) == proposed
    if verdict == "does not fit":
        assert [one.plan.fits for one in found] == [False, False, True]


OFFLOAD = "model.actor.offload.optimizer"


def test_offload_is_left_out_where_the_job_fits_without_it(tmp_path: Path) -> None:
    file = write_job(tmp_path, model={"actor": {"offload": {"optimizer": True}}})

    job, found = planned(file)

    assert changes(found) == [
        {ACTOR: False, TOKENS["actor"]: 8192},
        {CRITIC: False, TOKENS["critic"]: 8192},
        {ACTOR: False, CRITIC: False, TOKENS["actor"]: 4096, TOKENS["critic"]: 4096},
        {OFFLOAD: False},
        {OFFLOAD: False, ACTOR: False, TOKENS["actor"]: 8192},
        {OFFLOAD: False, CRITIC: False, TOKENS["critic"]: 8192},
        {OFFLOAD: False, ACTOR: False, CRITIC: False, TOKENS["actor"]: 4096, TOKENS["critic"]: 4096},
    ]
    steps = {json.dumps(one.changes): step_of(one.plan) for one in found}
    assert steps[json.dumps({OFFLOAD: False})] < step_of(job)


def test_offload_stays_where_the_job_does_not_fit_without_it(tmp_path: Path) -> None:
    def large(work: Work) -> Measured:
        return replace(activations(work), optimizer=10**11) if work.kind == "critic" else activations(work)

    file = write_job(tmp_path, model={"critic": {"offload": {"optimizer": True}}})
    job, found = planned(file, runner=large)
    assert job.verdict == "fits"
    assert found
    assert not [one for one in found if "model.critic.offload.optimizer" in one.changes]


def step_of(found: Plan) -> float:
    """Return the predicted seconds of a step."""
    seconds: float = json.loads(as_json(found))["seconds"]["step"]
    return seconds


def test_a_job_without_a_critic_has_no_settings_of_it(tmp_path: Path) -> None:
    rest = {"algorithm": {"advantageEstimator": "GRPO"}, "rollout": {"samplesPerPrompt": 2}}
    assert changes(planned(write_job(tmp_path, **rest))[1]) == [{ACTOR: False, TOKENS["actor"]: 8192}]


def test_each_change_by_set_has_the_same_plan(tmp_path: Path) -> None:
    """The names are those of the API, and the spec with them is valid."""
    file = write_job(tmp_path, model={"actor": {"activationOffload": True}, "critic": {"lora": {"rank": 4}}})
    _, found = planned(file)
    assert len(found) == 3
    for one in found:
        sets = [f"{field}={json.dumps(value)}" for field, value in one.changes.items()]
        again = plan_job(load(file, sets).spec, {"all": H200}, runner=activations)
        assert (again.spec, as_json(again)) == (one.plan.spec, as_json(one.plan))


def test_equal_work_is_measured_once(tmp_path: Path) -> None:
    measured: list[tuple[object, ...]] = []

    def counted(work: Work) -> Measured:
        measured.append((work.kind, work.options.gradient_checkpointing, work.sequences))
        return activations(work)

    planned(write_job(tmp_path), runner=measured_once(counted))

    trained = [(kind, is_on, 16384 // 128) for kind in ("actor", "critic") for is_on in (True, False)]
    smaller = [(kind, False, tokens // 128) for kind in ("actor", "critic") for tokens in (8192, 4096)]
    # The reference has the limit of the actor.
    references = [("ref", False, tokens // 128) for tokens in (16384, 8192, 4096)]
    assert sorted(measured) == sorted(trained + smaller + references)


def test_passes_larger_than_the_batch_are_equal_work(tmp_path: Path) -> None:
    """16 sequences of 128 tokens on each GPU, with limits of 16384, 8192 and 4096 tokens."""
    measured: list[tuple[str, bool]] = []

    def too_large(work: Work) -> Measured:
        measured.append((work.kind, work.options.gradient_checkpointing))
        return stub(work) if work.options.gradient_checkpointing else replace(stub(work), update=10**12)

    small = {"miniBatchSize": 32, "maxTokensPerGPU": 16384}
    file = write_job(tmp_path, data=LARGE | {"trainBatchSize": 32}, actor=small, critic=small)
    _, found = planned(file, runner=measured_once(too_large))

    assert found == []
    assert sorted(measured) == sorted([*((role, on) for role in TOKENS for on in (True, False)), ("ref", False)])


def test_other_work_is_measured_again(tmp_path: Path) -> None:
    measured: list[Work] = []

    def counted(work: Work) -> Measured:
        measured.append(work)
        return stub(work)

    runner = measured_once(counted)
    for sections in ({}, {"model": {"actor": {"lora": {"rank": 4}}}}, {"model": {"actor": {"lora": {"rank": 8}}}}):
        planned(write_job(tmp_path, **sections), runner=runner)
    ranks = {None if (lora := work.options.lora) is None else lora.rank for work in measured if work.kind == "actor"}
    assert ranks == {None, 4, 8}


def test_a_table_with_the_fastest_first(tmp_path: Path) -> None:
    job, found = planned(write_job(tmp_path))

    content = json.loads(as_json(job, settings=found))
    steps = [one["step"] for one in content["settings"]]
    assert content["settings"][0] == {
        "changes": {ACTOR: False, CRITIC: False, TOKENS["actor"]: 4096, TOKENS["critic"]: 4096},
        "fits": True,
        "isClose": False,
        "step": steps[0],
    }
    assert all(earlier < later for earlier, later in pairwise([*steps, content["seconds"]["step"]]))

    lines = printed(job, found)
    first = next(number for number, line in enumerate(lines) if line.startswith("the job as it is"))
    assert lines[first].split()[-3:] == [f"{job.pools[0].total / 1e9:.1f}", f"{content['seconds']['step']:.1f}", "fits"]
    assert lines[first + 1].startswith(
        f"{ACTOR}: false, {CRITIC}: false, {TOKENS['actor']}: 4096, {TOKENS['critic']}: 4096  "
    )
    assert lines[first + 1].split()[-2:] == [f"{steps[0]:.1f}", "fits"]
    assert len([line for line in lines if line.startswith("model.")]) == 3


def test_a_job_without_other_settings(tmp_path: Path) -> None:
    job, found = planned(write_job(tmp_path, model={"actor": dict(OFF), "critic": OFF}), replace(H200, memory=400e9))
    assert "No other setting of gradientCheckpointing or offload is faster and fits." in printed(job, found)


def printed(job: Plan, found: Sequence[ChangedPlan]) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=200).print(as_text(job, settings=found))
    return text.getvalue().splitlines()


def test_the_command_plans_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_commands_share(monkeypatch)
    small = {"miniBatchSize": 32, "maxTokensPerGPU": 1024}
    data = LARGE | {"trainBatchSize": 32}
    command = ["plan", str(write_job(tmp_path, data=data, actor=small, critic=small)), "--settings"]

    text = CliRunner().invoke(app, [*command, "--layouts"])
    found = CliRunner().invoke(app, [*command, "--json"])

    assert (text.exit_code, found.exit_code) == (0, 0), text.output + found.output
    assert f"\n{ACTOR}: false, {CRITIC}: false  " in text.stdout
    assert "\nthe job as it is  " in text.stdout
    assert "fits: the job as it is" in text.stdout, "the table of --layouts"
    assert json.loads(found.stdout)["layouts"] == []
    content = json.loads(found.stdout)
    assert content["settings"][0]["changes"] == {ACTOR: False, CRITIC: False}
    assert len(content["settings"]) == 3
    assert all(one["fits"] and one["step"] < content["seconds"]["step"] for one in content["settings"])
