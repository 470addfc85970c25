"""Estimators, policy losses and DAPO's parts, from verl's names to ours."""

from __future__ import annotations

from typing import Any

import pytest

from ppojob_trainer.commands.convert import Conversion, Target, convert, read_arguments

ACTOR = "actor_rollout_ref.actor"
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8")


def converted(*words: str) -> Conversion:
    return convert(read_arguments(["data.max_response_length=2048", *words]))


def spec(conversion: Conversion) -> dict[str, Any]:
    assert conversion.is_valid
    found: dict[str, Any] = conversion.manifest["spec"]
    return found


def not_carried(conversion: Conversion) -> dict[str, str]:
    return {entry.name: entry.why for entry in conversion.unconverted}


def to_fill(conversion: Conversion) -> dict[str, str]:
    return {entry.name: entry.why for entry in conversion.entries if entry.kind is Target.TO_FILL}


def test_recorded_experts_are_replayed_with_the_prefix_cache_on() -> None:
    replay = ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", f"{ACTOR}.router_replay.mode=R3")

    conversion = converted(*GRPO, *replay, "actor_rollout_ref.rollout.enable_prefix_caching=False")

    rollout = spec(conversion)["rollout"]
    assert rollout["routingReplay"] is True
    assert rollout.get("enablePrefixCaching", True) is True
    assert not_carried(conversion) == {}


def test_experts_of_the_trainers_own_passes_are_not_replayed() -> None:
    conversion = converted(*GRPO, f"{ACTOR}.router_replay.mode=R2")

    assert "routingReplay" not in spec(conversion)["rollout"]
    assert "rollout.routingReplay" in not_carried(conversion)[f"{ACTOR}.router_replay.mode"]


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("words", "divides"),
    [
        (["tensor_model_parallel_size=2", "expert_parallel_size=2"], True),
        (["tensor_model_parallel_size=2", "expert_parallel_size=1"], None),
        (["expert_parallel_size=1"], None),
        (["tensor_model_parallel_size=1", "expert_parallel_size=1"], None),
    ],
)
def test_all_gpus_of_an_engine_divide_its_experts_or_none(words: list[str], divides: bool | None) -> None:
    conversion = converted(*GRPO, *(f"{ROLLOUT}.{word}" for word in words))

    assert spec(conversion)["rollout"].get("enableExpertParallel") is divides
    assert not_carried(conversion) == {}


@pytest.mark.parametrize(
    "words",
    # Over the GPUs of several engines of verl, and over an engine whose size is not given.
    [["tensor_model_parallel_size=2", "expert_parallel_size=8"], ["expert_parallel_size=2"]],
)
def test_experts_over_other_gpus_than_those_of_an_engine_are_not_converted(words: list[str]) -> None:
    conversion = converted(*GRPO, *(f"{ROLLOUT}.{word}" for word in words))

    assert "enableExpertParallel" not in spec(conversion).get("rollout", {})
    assert "see rollout.enableExpertParallel" in not_carried(conversion)[f"{ROLLOUT}.expert_parallel_size"]


FP8 = "actor_rollout_ref.rollout.quantization=fp8"


def test_an_fp8_rollout_gets_the_importance_weights_that_it_needs() -> None:
    conversion = converted(*GRPO, FP8, "actor_rollout_ref.rollout.calculate_log_probs=False")

    found = spec(conversion)
    assert found["rollout"]["quantization"] == "FP8"
    assert found["rollout"].get("logProbs", True) is True
    assert found["algorithm"]["rolloutCorrection"] == {"method": "Truncate"}
    assert "verl's run had none" in to_fill(conversion)["algorithm.rolloutCorrection"]
    assert not_carried(conversion) == {}


def test_an_fp8_rollout_keeps_the_importance_weights_that_it_has() -> None:
    correction = "algorithm.rollout_correction"
    words = (f"{correction}.rollout_is=sequence", f"{correction}.rollout_is_threshold=3.0")

    conversion = converted(*GRPO, FP8, *words)

    assert spec(conversion)["rollout"]["quantization"] == "FP8"
    weights = {"method": "Truncate", "level": "Sequence", "upper": 3.0}
    assert spec(conversion)["algorithm"]["rolloutCorrection"] == weights
    assert "algorithm.rolloutCorrection" not in to_fill(conversion)


def test_verls_bypass_takes_the_engines_log_probs() -> None:
    correction = "algorithm.rollout_correction"
    words = (f"{correction}.bypass_mode=True", f"{correction}.rollout_is=token", f"{correction}.loss_type=ppo_clip")

    conversion = converted(*GRPO, *words)

    assert spec(conversion)["algorithm"]["rolloutCorrection"] == {"method": "Bypass"}
    assert not_carried(conversion) == {}
    other = converted(*GRPO, words[0], f"{correction}.loss_type=reinforce")
    assert "policyLoss" in not_carried(other)[f"{correction}.loss_type"]


def test_other_formats_of_a_rollout_are_reported() -> None:
    name, _, _ = FP8.partition("=")

    conversion = converted(*GRPO, f"{name}=torchao")

    assert "quantization" not in spec(conversion)["rollout"]
    assert "see rollout.quantization" in not_carried(conversion)[name]


@pytest.mark.parametrize(("mode", "loss"), [("vanilla", "PPO"), ("gspo", "GSPO"), ("cispo", "CISPO")])
def test_policy_losses(mode: str, loss: str) -> None:
    conversion = converted(*GRPO, f"{ACTOR}.policy_loss.loss_mode={mode}", f"{ACTOR}.clip_ratio_high=0.0004")

    assert spec(conversion)["algorithm"] == {"advantageEstimator": "GRPO", "policyLoss": loss}
    assert spec(conversion)["actor"]["clipRatioHigh"] == 0.0004
    assert not_carried(conversion) == {}


def test_a_bound_below_0_is_none_for_cispo() -> None:
    words = (*GRPO, f"{ACTOR}.clip_ratio_low=10")

    found = spec(converted(*words, f"{ACTOR}.policy_loss.loss_mode=cispo"))

    assert found["actor"]["clipRatioLow"] == 1
    assert not converted(*words).is_valid, "PPO reads it otherwise"


def test_dr_grpo_is_grpo_without_the_deviation_and_with_a_constant_length() -> None:
    conversion = converted(
        *GRPO,
        "algorithm.norm_adv_by_std_in_grpo=False",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor=2048",
    )

    assert spec(conversion)["algorithm"] == {"advantageEstimator": "DrGRPO"}
    assert spec(conversion)["actor"]["lossAggregation"] == "SeqMeanTokenSumNorm"
    assert not_carried(conversion) == {}
    # Only grpo reads it.
    words = ("algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=8")
    rloo = converted(*words, "algorithm.norm_adv_by_std_in_grpo=False")
    assert spec(rloo)["algorithm"] == {"advantageEstimator": "RLOO"}


@pytest.mark.parametrize(("limit", "rounds"), [("10", 10), ("0", 1000)])
def test_dynamic_sampling(limit: str, rounds: int) -> None:
    at = "algorithm.filter_groups"
    conversion = converted(
        *GRPO, f"{at}.enable=True", f"{at}.metric=acc", f"{at}.max_num_gen_batches={limit}", "data.gen_batch_size=512"
    )

    assert spec(conversion)["algorithm"]["dynamicSampling"] == {"maxGenerationBatches": rounds}
    assert not_carried(conversion) == {}


def test_the_limit_of_dynamic_sampling_counts_the_batches_that_are_trained() -> None:
    at = "algorithm.filter_groups"
    sizes = ("data.train_batch_size=512", "data.gen_batch_size=1536")
    conversion = converted(*GRPO, f"{at}.enable=True", f"{at}.metric=acc", f"{at}.max_num_gen_batches=10", *sizes)

    assert spec(conversion)["algorithm"]["dynamicSampling"] == {"maxGenerationBatches": 30}


def test_another_metric_of_dynamic_sampling_is_to_be_checked() -> None:
    at = "algorithm.filter_groups"
    conversion = converted(*GRPO, f"{at}.enable=True", f"{at}.metric=seq_final_reward")

    assert to_fill(conversion)["algorithm.dynamicSampling"].startswith("verl compares seq_final_reward")


def test_without_dynamic_sampling_nothing_is_written() -> None:
    conversion = converted(*GRPO, "algorithm.filter_groups.enable=False", "algorithm.filter_groups.metric=acc")

    assert "dynamicSampling" not in spec(conversion)["algorithm"]
    assert not_carried(conversion) == {}


@pytest.mark.parametrize(
    ("manager", "at"),
    [
        ("reward_model.reward_manager", "reward_model.overlong_buffer"),
        ("reward_model.reward_manager", "reward_model.reward_kwargs.overlong_buffer_cfg"),
        ("reward.reward_manager.name", "reward.reward_kwargs.overlong_buffer_cfg"),
    ],
)
def test_overlong_responses(manager: str, at: str) -> None:
    kwargs = at.rpartition(".")[0] if "kwargs" in at else "reward_model.reward_kwargs"
    conversion = converted(
        f"{manager}=dapo",
        f"{at}.enable=True",
        f"{at}.len=512",
        f"{at}.penalty_factor=0.5",
        f"{at}.log=False",
        f"{kwargs}.max_resp_len=2048",
    )

    assert spec(conversion)["reward"]["overlongPenalty"] == {"buffer": 512, "factor": 0.5}
    assert not_carried(conversion) == {}


def test_a_penalty_that_verl_would_not_compute_is_to_be_checked() -> None:
    at = "reward_model.reward_kwargs"
    words = (f"{at}.overlong_buffer_cfg.enable=True", f"{at}.overlong_buffer_cfg.len=512", f"{at}.max_resp_len=99")
    conversion = converted(*words)

    asked = [entry.name for entry in conversion.entries if entry.kind is Target.TO_FILL]
    assert "reward.overlongPenalty" in asked
    assert "data.maxResponseLength" in not_carried(conversion)["reward.reward_kwargs.max_resp_len"]


def test_a_penalty_that_is_off_is_none() -> None:
    at = "reward_model.reward_kwargs.overlong_buffer_cfg"
    conversion = converted("reward_model.reward_manager=dapo", f"{at}.enable=False", f"{at}.len=512")

    assert "overlongPenalty" not in spec(conversion)["reward"]
    assert not_carried(conversion) == {}


def test_the_dapo_program_is_the_trainer() -> None:
    conversion = convert(read_arguments(["python3", "-m", "recipe.dapo.main_dapo", *GRPO, "data.train_batch_size=512"]))

    assert spec(conversion)["algorithm"] == {"advantageEstimator": "GRPO"}
    assert set(not_carried(conversion)) == {"--config-name"}, "its defaults are in a file that is not here"


ENGINE = "actor_rollout_ref.rollout.engine_kwargs"


def test_vllms_arguments_keep_their_names() -> None:
    conversion = converted(
        *GRPO,
        f"+{ENGINE}.vllm.kv_cache_dtype=fp8",
        f"+{ENGINE}.vllm.block-size=32",
        f"+{ENGINE}.vllm.compilation_config.level=3",
        f"+{ENGINE}.vllm.compilation_config.pass_config.fuse_norm=True",
        f"+{ENGINE}.vllm.compilation_config.pass_config.fuse_act=False",
        f"+{ENGINE}.vllm.swap_space=null",
        f"+{ENGINE}.sglang.attention_backend=fa3",
    )

    assert spec(conversion)["rollout"]["engineArgs"] == {
        "kv_cache_dtype": "fp8",
        "block_size": 32,
        "compilation_config": {"level": 3, "pass_config": {"fuse_norm": True, "fuse_act": False}},
    }
    assert not_carried(conversion) == {}


def test_vllms_arguments_that_are_not_given_one_by_one_are_not_lost() -> None:
    conversion = converted(*GRPO, f"+{ENGINE}.vllm={{kv_cache_dtype: fp8}}")

    assert "engineArgs" not in spec(conversion)["rollout"]
    assert not_carried(conversion) == {f"{ENGINE}.vllm": "give vLLM's arguments in rollout.engineArgs"}


def test_vllms_arguments_that_have_a_field_are_named() -> None:
    conversion = converted(*GRPO, f"+{ENGINE}.vllm.max_num_seqs=64")

    assert "engineArgs" not in spec(conversion)["rollout"]
    assert not_carried(conversion) == {f"{ENGINE}.vllm.max_num_seqs": "use rollout.maxNumSeqs"}
