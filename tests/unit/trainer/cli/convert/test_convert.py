"""From verl's settings to a PPOJob that passes its checks, and the list of what was not converted."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ppojob_api.v1alpha1.schema import structural
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.cli import app
from ppojob_trainer.commands.convert import (
    Conversion,
    Options,
    Settings,
    Target,
    convert,
    draft,
    read,
    read_arguments,
)
from ppojob_trainer.commands.convert.rows import Converted
from ppojob_trainer.commands.convert.scripts.bash_run import Sandbox
from ppojob_trainer.commands.convert.table import DEFAULTS, TABLE

SCRIPT = """#!/usr/bin/env bash
set -x
MODEL=${MODEL:-/data/models/small}
mini=$((256 / 4))
ALGORITHM=(
    algorithm.adv_estimator=gae      # with a critic
    algorithm.use_kl_in_reward=True
    algorithm.kl_penalty=low_var_kl
)
python3 -m verl.trainer.main_ppo \\
    "${ALGORITHM[@]}" \\
    data.train_files="['/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']" \\
    data.val_files=/data/gsm8k/test.parquet \\
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=256 \\
    data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.model.path=$MODEL critic.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$mini \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.clip_ratio=0.1 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    critic.optim.lr=1e-5 \\
    custom_reward_function.path=/data/reward.py custom_reward_function.name=score \\
    trainer.logger='["console","wandb"]' trainer.project_name=gsm8k trainer.experiment_name='Qwen2.5_PPO' \\
    trainer.n_gpus_per_node=4 trainer.nnodes=2 trainer.save_freq=-1 trainer.test_freq=5 \\
    trainer.total_training_steps=300 $@ 2>&1 | tee verl.log
"""
SAID = ("data.train_files=/data/a.parquet", "actor_rollout_ref.model.path=/data/m", "trainer.total_training_steps=9")


def converted(*words: str) -> Conversion:
    conversion = convert(read_arguments([*SAID, *words]))
    parse_manifest(conversion.manifest)
    return conversion


def value_at(conversion: Conversion, path: str) -> Any:
    node: Any = conversion.manifest["spec"]
    for part in path.split("."):
        node = node[part]
    return node


def unconverted(conversion: Conversion) -> dict[str, str]:
    return {entry.name: entry.why for entry in conversion.unconverted}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize("runs", [True, False], ids=["bash", "static"])
def test_a_usual_script_is_converted_completely(runs: bool, script: str) -> None:
    conversion = convert(read([script], Options(runs, limit=120)))
    namespace, name, spec = parse_manifest(conversion.manifest)

    assert (namespace, name, conversion.unconverted) == ("default", "qwen2-5-ppo", [])
    assert spec.data.train.files is not None
    assert spec.data.train.files.paths == ["/data/gsm8k/train.parquet", "/data/math/train.parquet"]
    assert (spec.data.train_batch_size, spec.data.overlong_prompts.value) == (256, "Filter")
    assert (spec.actor.mini_batch_size, spec.critic.mini_batch_size) == (64, 64), "the critic's is the actor's in verl"
    assert (spec.actor.clip_ratio_low, spec.actor.clip_ratio_high, spec.actor.learning_rate) == (0.1, 0.1, 1e-6)
    assert (spec.algorithm.kl.in_reward, spec.algorithm.kl.estimator.value) == (True, "K3")
    assert (spec.pools[0].nodes, spec.pools[0].gpus_per_node) == (2, 4)
    assert spec.rollout.tensor_parallel_size == 2
    assert (spec.checkpoint.every_steps, spec.trainer.validate_every_steps, spec.trainer.total_steps) == (0, 5, 300)
    assert spec.reward.function is not None
    assert (spec.reward.function.path, spec.reward.function.name) == ("/data/reward.py", "score")
    assert [tracker.value for tracker in spec.telemetry.trackers] == ["WandB"]
    assert spec.model.critic.path is None, "the same model as the actor's"


def test_what_the_user_must_fill_in_is_at_the_files_head(script: str) -> None:
    text = convert(read([script], Options(runs=False))).to_yaml()

    assert "#   spec.image: " in text
    assert "image: ppojob-trainer-cuda:" in text, "verl's launches are for GPUs"
    assert "#   spec.data.train.files.paths: verl read $HOME/data/math/train.parquet: the pods must find it" in text
    parse_manifest(yaml.safe_load(text))


def test_every_target_of_the_table_is_a_field() -> None:
    targets = {target for row in TABLE if isinstance(row, Converted) for target in row.targets} | set(DEFAULTS)
    written = set(
        re.findall(r'"((?:model|data|reward|checkpoint|trainer|telemetry|storage)(?:\.\w+)+)"', source(draft))
    )

    assert len(targets) > 60
    assert [target for target in sorted(targets | written) if not is_field(target)] == []


def source(module: Any) -> str:
    lines = Path(module.__file__).read_text().splitlines()
    # Names that are looked up are verl's; fields of ours are written.
    return "\n".join(line for line in lines if "draft.values[" in line or "target =" in line)


def is_field(path: str) -> bool:
    schema = structural(PPOJobSpec)
    for part in path.split("."):
        schema = schema.get("properties", {}).get(part)
        if schema is None:
            return False
    return True


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ("data.truncation=left", "data.overlongPrompts", "Truncate"),
        ("data.prompt_key=question", "data.train.files.promptColumn", "question"),
        (
            "data.apply_chat_template_kwargs={enable_thinking:False}",
            "data.chatTemplateKwargs",
            {"enable_thinking": False},
        ),
        ("+data.seed=7", "trainer.seed", 7),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.4", "actor.learningRateWarmupSteps", 3),
        ("actor_rollout_ref.actor.optim.warmup_style=cosine", "actor.learningRateSchedule", "Cosine"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "actor.sequenceParallelSize", 2),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=4", "actor.fsdpSize", 4),
        ("actor_rollout_ref.actor.kl_loss_type=mse", "algorithm.kl.lossEstimator", "K2"),
        ("actor_rollout_ref.actor.checkpoint.async_save=True", "checkpoint.async", True),
        ("actor_rollout_ref.model.lora_rank=8", "model.actor.lora", {"rank": 8, "alpha": 16}),
        ("actor_rollout_ref.model.path=Qwen/Qwen3-8B", "model.actor.path", "hf://Qwen/Qwen3-8B"),
        ("actor_rollout_ref.ref.model.path=Qwen/Qwen3-8B", "model.ref.path", "hf://Qwen/Qwen3-8B"),
        ("actor_rollout_ref.ref.model.path=/data/models/reference", "model.ref.path", "/data/models/reference"),
        ("critic.model.path=~/models/critic", "model.critic.path", "/data/models/critic"),
        ("critic.model.fsdp_config.param_offload=True", "model.critic.offload.parameters", True),
        ("trainer.resume_mode=disable", "checkpoint.resume", "Never"),
        ("trainer.save_freq=20", "checkpoint.everySteps", 20),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "rollout.pipelineParallelSize", 2),
        ("reward_model.enable=True", "reward.type", "Model"),
        ("trainer.experiment_name=123", None, None),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "critic.lossAggregation", "SeqMeanTokenSum"),
        ("actor_rollout_ref.model.trust_remote_code=True", "model.critic.trustRemoteCode", True),
        ("+data.apply_chat_template_kwargs.effort=low", "data.chatTemplateKwargs", {"effort": "low"}),
        ("actor_rollout_ref.model.lora.rank=8", "model.actor.lora", {"rank": 8, "alpha": 32}),
        ("actor_rollout_ref.actor.megatron.param_offload=True", "model.ref.offload.parameters", True),
        # verl's defaults, where they are not ours.
        ("trainer.nnodes=1", "rollout.tensorParallelSize", 2),
        ("trainer.nnodes=1", "rollout.maxNumSeqs", 256),
        ("trainer.nnodes=1", "telemetry.trackers", ["WandB"]),
        ("trainer.logger=console", "telemetry.trackers", []),
    ],
)
def test_single_settings(word: str, path: str | None, value: Any) -> None:
    conversion = converted(word)

    assert conversion.unconverted == []
    if path is not None:
        assert value_at(conversion, path) == value


def test_without_a_function_the_data_source_chooses_it() -> None:
    assert value_at(converted(), "reward.function.module") == "ppojob_trainer.rewards.by_data_source"


def test_validation_takes_the_likeliest_token_unless_it_samples() -> None:
    base = "actor_rollout_ref.rollout.val_kwargs"

    assert value_at(converted(f"{base}.temperature=0.7"), "rollout.validation.temperature") == 0.0
    sampled = converted(f"{base}.temperature=0.7", f"{base}.do_sample=True", f"{base}.n=4")
    assert value_at(sampled, "rollout.validation") == {"temperature": 0.7, "samplesPerPrompt": 4}


def test_with_adapters_the_reference_has_no_settings() -> None:
    conversion = converted(
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    )

    assert conversion.unconverted == []
    lora = {"rank": 8, "alpha": 16, "targetModules": ["q_proj", "v_proj"]}
    assert value_at(conversion, "model")["actor"]["lora"] == lora
    assert "ref" not in value_at(conversion, "model")


def test_a_reward_model_scores_alone_as_in_verl() -> None:
    words = ("reward_model.enable=True", "reward_model.model.path=/data/rm", "reward.num_workers=8")
    conversion = converted(*words, "custom_reward_function.path=/data/r.py")

    assert value_at(conversion, "reward") == {"type": "Model"}
    assert value_at(conversion, "model.reward.path") == "/data/rm"
    assert "set reward.type Both" in unconverted(conversion)["custom_reward_function.path"]
    # Without it, settings of the reward model have nothing to say.
    without = converted("reward_model.enable=False", "reward_model.model.trust_remote_code=True")
    assert "reward" not in without.manifest["spec"]["model"]


def test_without_a_critic_nothing_is_said_of_one() -> None:
    words = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "critic.optim.lr=1e-5")
    conversion = converted(*words, "actor_rollout_ref.actor.use_kl_loss=True", "trainer.critic_warmup=0")

    assert "critic" not in conversion.manifest["spec"]
    assert value_at(conversion, "algorithm") == {"advantageEstimator": "GRPO", "kl": {"inLoss": True}}


@pytest.mark.parametrize(
    ("word", "why"),
    [
        (
            "algorithm.adv_estimator=remax",
            "'remax' has no counterpart (there are gae, grpo, rloo, reinforce_plus_plus): choose one of them",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "write your own function"),
        ("actor_rollout_ref.rollout.name=sglang", "vLLM generates"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "no servers, tools or agent loops"),
        ("actor_rollout_ref.actor.strategy=megatron", "FSDP2"),
        ("data.truncation=middle", "Truncate keeps the end"),
        ("trainer.logger=[console,swanlab]", "Prometheus"),
        ("actor_rollout_ref.actor.kl_loss_type=low_var_kl+", "another gradient"),
        ("data.train_batch_size=lots", "not a whole number"),
        ("data.max_prompt_length=$LENGTH", "this variable is not set"),
        ("no.such.setting=1", "is not known"),
        ("actor_rollout_ref.rollout.brand_new=1", "is not known"),
        ("actor_rollout_ref.model.brand_new=1", "is not known"),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2", "trained by FSDP2"),
        ("actor_rollout_ref.rollout.server.timeout=60", "no servers, tools or agent loops"),
        ("data.image_key=images", "prompts are text"),
        ("reward_model.reward_kwargs.own_setting=512", "reward.function.kwargs"),
        ("actor_rollout_ref.actor.loss_scale_factor=99", "divides by data.maxResponseLength"),
        ("model_engine=megatron", "trained by FSDP2"),
        ("data.max_prompt_length=", "not a whole number"),
    ],
)
def test_a_setting_that_cannot_be_converted_is_listed_with_the_reason(word: str, why: str) -> None:
    conversion = converted(word)

    assert why in unconverted(conversion)[word.partition("=")[0]]


def test_a_value_that_our_checks_refuse_is_reported_and_the_file_is_invalid() -> None:
    conversion = convert(read_arguments([*SAID, "data.train_batch_size=100"]))

    refused = {entry.name for entry in conversion.entries if entry.kind is Target.REFUSED}
    assert refused == {"actor.miniBatchSize", "critic.miniBatchSize"}
    assert not conversion.is_valid


def test_what_has_nothing_to_say_here_is_no_loss() -> None:
    conversion = converted("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "trainer.balance_batch=True")

    assert conversion.unconverted == []
    assert [entry.kind for entry in conversion.entries if entry.kind is not Target.TO_FILL] == [Target.NEEDLESS] * 2


def test_settings_of_nothing_ask_for_model_and_data() -> None:
    conversion = convert(Settings({"algorithm.gamma": 0.9}))

    assert conversion.is_valid
    asked = {entry.name for entry in conversion.entries if entry.kind is Target.TO_FILL}
    assert {"model.actor.path", "data.train.files.paths", "image"} <= asked


class TestCommand:
    def run(self, *words: str, text: str | None = None) -> Any:
        return CliRunner().invoke(app, ["convert", *words], input=text)

    def test_a_script_becomes_a_file_that_is_valid(self, tmp_path: Path) -> None:
        (tmp_path / "run.sh").write_text(SCRIPT)

        result = self.run(str(tmp_path / "run.sh"), "--output", str(tmp_path / "job.yaml"), "--strict")

        assert result.exit_code == 0, result.output
        assert result.stdout == ""
        assert "to fill in" in result.stderr
        assert CliRunner().invoke(app, ["validate", str(tmp_path / "job.yaml")]).exit_code == 0

    def test_words_and_standard_input_are_read_too(self) -> None:
        words = self.run("--", *SAID, "+data.seed=3")
        piped = self.run("-", text="python -m verl.trainer.main_ppo " + " ".join(SAID) + " +data.seed=3")

        assert words.stdout == piped.stdout
        assert yaml.safe_load(words.stdout)["spec"]["trainer"]["seed"] == 3

    def test_strict_makes_a_loss_an_error(self) -> None:
        loss = (*SAID, "algorithm.adv_estimator=remax")

        assert self.run("--", *loss).exit_code == 0
        strict = self.run("--strict", "--", *loss)
        assert strict.exit_code == 1
        assert "remax" in strict.stderr

    def test_a_branch_is_decided_by_bash_or_refused(self, tmp_path: Path) -> None:
        script = tmp_path / "run.sh"
        launch = "python3 -m verl.trainer.main_ppo data.train_batch_size=$B " + " ".join(SAID)
        script.write_text(f"if [ $DEVICE = npu ]; then B=16; else B=1024; fi\n{launch}")

        ran = self.run(str(script), "--run", "--limit", "120", "--env", "DEVICE=gpu")
        static = self.run(str(script), "--static")

        assert yaml.safe_load(ran.stdout)["spec"]["data"]["trainBatchSize"] == 1024
        assert "programs were recorded" in " ".join(ran.stderr.split())
        assert static.exit_code == 1
        assert f"{script}:1: an if (line 1: B=16; line 1: B=1024)" in " ".join(static.stderr.split())

    def test_without_a_sandbox_a_script_is_not_run_unless_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules[Options.__module__], "best_sandbox", lambda: Sandbox.NONE)
        (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo " + " ".join(SAID))

        default = self.run(str(tmp_path / "run.sh"))
        asked = self.run(str(tmp_path / "run.sh"), "--run", "--limit", "120")

        assert "neither bwrap nor unshare works" in " ".join(default.stderr.split())
        assert "WITHOUT a sandbox" in " ".join(asked.stderr.split())
        assert default.stdout == asked.stdout

    def test_a_variable_without_a_value_is_refused(self) -> None:
        assert "--env NODES: give a name and a value" in self.run("run.sh", "--env", "NODES").stderr

    def test_a_file_that_is_not_there_is_a_sentence(self) -> None:
        result = self.run("nowhere.sh")

        assert result.exit_code == 1
        assert "nowhere.sh: it cannot be read" in result.stderr


@pytest.mark.parametrize("size", [-1, 8, 16])
def test_a_model_that_verl_shards_over_all_ranks_has_one_copy(size: int) -> None:
    conversion = converted(f"actor_rollout_ref.actor.fsdp_config.fsdp_size={size}", "trainer.n_gpus_per_node=8")

    assert "fsdpSize" not in conversion.manifest["spec"].get("actor", {})
    assert [entry.name for entry in conversion.unconverted if "fsdp_size" in entry.name] == []
