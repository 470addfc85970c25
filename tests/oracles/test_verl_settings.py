"""verl's own configuration takes the benchmark's settings: it knows every name, and values arrive where they act."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bench import workload
from tests.bench.layouts import layout
from tests.bench.measurement import spec_of
from tests.bench.verl_settings import COLOCATED, ONE_STEP_OFF, overrides
from tests.environments import OwnEnvironment, run
from tests.oracles.environments import ANSWER_LIMIT_SECONDS, HERE
from tests.unit.bench.test_verl import grpo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, size = tmp_path_factory.mktemp("verl"), workload.Size()
    spec = spec_of(workload.job(folder, size, layout("colocated", 2), 6, "CUDA"))
    chosen = {
        schedule.module: overrides(of_schedule, size, folder / "prompts.parquet", folder, schedule)
        for schedule, of_schedule in ((COLOCATED, spec), (ONE_STEP_OFF, grpo(2)))
    }
    given, answered = folder / "overrides.json", folder / "answers.json"
    given.write_text(json.dumps(chosen), encoding="utf-8")
    python = OwnEnvironment("oracles", "verl", HERE / "verl-requirements.txt").python()
    # Hydra refuses a name that the configuration does not have.
    run([python, HERE / "verl_settings_oracle.py", given, answered], ANSWER_LIMIT_SECONDS)
    found: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 64),
        ("actor_rollout_ref.ref.strategy", "fsdp2"),
        ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz", True),
        ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", 49_152),
        ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", True),
        ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", 49_152),
        ("actor_rollout_ref.rollout.prompt_length", 130),
        ("actor_rollout_ref.rollout.response_length", 512),
        ("actor_rollout_ref.rollout.enforce_eager", False),
        ("actor_rollout_ref.actor.use_fused_kernels", True),
        ("critic.use_dynamic_bsz", True),
        ("critic.strategy", "fsdp2"),
        ("trainer.logger", ["console", "file"]),
        ("trainer.use_v1", True),
        ("trainer.v1.trainer_mode", "sync"),
    ],
)
def test_settings_reach_the_parts_that_follow_them(answers: dict[str, Any], name: str, value: object) -> None:
    assert value_of(answers["configs"][COLOCATED.module], name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor_rollout_ref.rollout.n", 8),
        ("actor_rollout_ref.actor.use_kl_loss", True),
        ("actor_rollout_ref.actor.kl_loss_type", "low_var_kl"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend", "nccl"),
        ("algorithm.adv_estimator", "grpo"),
        ("algorithm.rollout_correction.bypass_mode", True),
        ("trainer.n_gpus_per_node", 1),
        ("rollout.n_gpus_per_node", 1),
    ],
)
def test_the_program_of_one_step_off_takes_them_too(answers: dict[str, Any], name: str, value: object) -> None:
    assert value_of(answers["configs"][ONE_STEP_OFF.module], name) == value


def value_of(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config


def test_the_critics_budget_is_a_field_that_verl_reads(answers: dict[str, Any]) -> None:
    name = "ppo_infer_max_token_len_per_gpu"

    assert answers["configs"][COLOCATED.module]["critic"][name] == 49_152
    assert name in answers["critic"]
