"""A model that does not fit the job is refused from its configuration and tokenizer, with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from ppojob_api.v1alpha1.data import DataSpec
from ppojob_api.v1alpha1.model import ActorModel, ModelSpec
from ppojob_api.v1alpha1.rollout import Quantization, RolloutSpec
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.engines.train.model_fit import (
    check_context,
    check_engine_parts,
    check_heads,
    check_quantization,
    check_vocabulary,
    context_length,
)

WORDS = ["<end>", "a", "b", "c"]


def data(prompt: int, response: int) -> DataSpec:
    train = {"reasoningGym": {"task": "chain_sum"}}
    raw = {"train": train, "maxPromptLength": prompt, "maxResponseLength": response}
    return DataSpec.model_validate(raw)


def write_tokenizer(folder: Path, words: list[str]) -> str:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=words[0]).save_pretrained(folder)
    return str(folder)


def test_what_fits_the_context_passes_to_the_last_token() -> None:
    check_context("actor", "/m", LlamaConfig(max_position_embeddings=64), data(24, 40))


def test_prompt_and_response_above_the_context_are_refused_with_the_numbers() -> None:
    with pytest.raises(ModelMismatchError) as raised:
        check_context("critic", "/m", LlamaConfig(max_position_embeddings=64), data(25, 40))

    assert str(raised.value) == (
        "the critic's model /m takes at most 64 tokens, and data.maxPromptLength 25 + data.maxResponseLength 40 are "
        "65: lower one of them until their sum is 64, or use a model with a longer context"
    )


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 64),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 256),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    ],
)
def test_stretched_positions_count(rope: dict[str, float], expected: int) -> None:
    config = LlamaConfig(max_position_embeddings=64)
    config.rope_parameters = rope

    assert context_length(config) == expected


def test_the_same_tokens_pass_and_so_does_room_to_spare(tmp_path: Path) -> None:
    actor = write_tokenizer(tmp_path / "actor", WORDS)
    critic = write_tokenizer(tmp_path / "critic", [*WORDS, "more"])
    spec = ModelSpec(actor=ActorModel(path=actor))

    check_vocabulary("critic", critic, LlamaConfig(vocab_size=128), spec)
    (tmp_path / "bare").mkdir()
    check_vocabulary("critic", str(tmp_path / "bare"), LlamaConfig(vocab_size=4), spec)


def test_another_vocabulary_is_refused_with_a_token_that_differs(tmp_path: Path) -> None:
    actor = write_tokenizer(tmp_path / "actor", WORDS)
    critic = write_tokenizer(tmp_path / "critic", ["<end>", "a", "c", "b"])

    with pytest.raises(
        ModelMismatchError,
        match=r"critic has another vocabulary than the actor's .*: 2 of 4 tokens differ, such as 'b' \(2 for the actor,"
        r" 3 for the critic\)",
    ):
        check_vocabulary("critic", critic, LlamaConfig(vocab_size=4), ModelSpec(actor=ActorModel(path=actor)))


def test_a_model_without_room_for_the_actors_tokens_is_refused(tmp_path: Path) -> None:
    actor = write_tokenizer(tmp_path / "actor", WORDS)
    (tmp_path / "bare").mkdir()

    with pytest.raises(ModelMismatchError, match=r"bare has 3 tokens, and the actor's tokenizer in .* up to 3"):
        check_vocabulary(
            "ref", str(tmp_path / "bare"), LlamaConfig(vocab_size=3), ModelSpec(actor=ActorModel(path=actor))
        )


def test_a_rollout_size_divides_the_heads_and_key_heads_may_be_repeated() -> None:
    config = LlamaConfig(hidden_size=48, num_attention_heads=12, num_key_value_heads=4)
    check_heads(config, "rollout.tensorParallelSize", 6)
    with pytest.raises(ModelMismatchError, match=r"rollout.tensorParallelSize 5 does not divide .* 12: use"):
        check_heads(config, "rollout.tensorParallelSize", 5)


def test_the_gpus_of_an_engine_have_equally_many_experts() -> None:
    mixture = Qwen3MoeConfig(num_attention_heads=12, num_experts=8)
    for size in (2, 4):
        check_engine_parts(mixture, RolloutSpec(tensor_parallel_size=size, enable_expert_parallel=True))
    check_engine_parts(mixture, RolloutSpec(tensor_parallel_size=3))
    says = (
        r"^rollout\.tensorParallelSize 3 does not divide this qwen3_moe's number of experts 8: use a divisor, or set "
        r"rollout\.enableExpertParallel to false$"
    )
    with pytest.raises(ModelMismatchError, match=says):
        check_engine_parts(mixture, RolloutSpec(tensor_parallel_size=3, enable_expert_parallel=True))
    with pytest.raises(ModelMismatchError, match=r"rollout.tensorParallelSize 5 does not divide .*_heads 12: use a"):
        check_engine_parts(mixture, RolloutSpec(tensor_parallel_size=5))


def test_key_heads_of_gpt_oss_are_not_repeated() -> None:
    config = AutoConfig.for_model("gpt_oss", num_attention_heads=8, num_key_value_heads=2)
    check_engine_parts(config, RolloutSpec(tensor_parallel_size=2))
    says = r"^rollout\.tensorParallelSize 4 does not divide this gpt_oss's num_key_value_heads 2, of which vLLM has no"
    with pytest.raises(ModelMismatchError, match=says):
        check_engine_parts(config, RolloutSpec(tensor_parallel_size=4))


def test_stages_and_parts_of_gpt_oss_divide_an_expert_together() -> None:
    config = AutoConfig.for_model("gpt_oss", intermediate_size=2880)
    check_engine_parts(config, RolloutSpec(tensor_parallel_size=4, pipeline_parallel_size=3))
    says = r"tensorParallelSize 1 does not .* intermediate_size 2880 together with rollout\.pipelineParallelSize 7: let"
    with pytest.raises(ModelMismatchError, match=says):
        check_engine_parts(config, RolloutSpec(pipeline_parallel_size=7))


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ({"moe_backend": "flashinfer_cutlass"}, True),
        ({"decode_context_parallel_size": 2}, True),
        ({"moe_backend": "triton", "block_size": 32}, False),
    ],
)
def test_kernels_that_compute_gpt_oss_otherwise_are_refused(arguments: dict[str, Any], refused: bool) -> None:
    rollout = RolloutSpec(engine_args=arguments)
    check_engine_parts(AutoConfig.for_model("qwen3_moe"), rollout)
    if not refused:
        check_engine_parts(AutoConfig.for_model("gpt_oss"), rollout)
        return
    with pytest.raises(ModelMismatchError, match=r"^rollout\.engineArgs\.\w+ .*: remove it$"):
        check_engine_parts(AutoConfig.for_model("gpt_oss"), rollout)


@pytest.mark.parametrize(
    ("dense", "step", "stages", "layers"),
    [
        ([], 1, 5, None),
        ([3, 4], 1, 2, "3 to 4"),
        ([2, 3], 1, 2, None),
        # Five layers in four stages: one, one, two and one.
        ([2, 3], 1, 4, "2 to 3"),
        ([2], 1, 4, None),
        # The second and the fourth layer have experts.
        ([], 2, 3, "4 to 4"),
        ([], 2, 2, None),
    ],
)
def test_each_stage_of_qwen3_moe_has_experts(dense: list[int], step: int, stages: int, layers: str | None) -> None:
    config = Qwen3MoeConfig(num_hidden_layers=5, mlp_only_layers=dense, decoder_sparse_step=step)
    rollout = RolloutSpec(pipeline_parallel_size=stages)
    if layers is None:
        check_engine_parts(config, rollout)
    else:
        says = f"rollout.pipelineParallelSize {stages}: layers {layers} of this qwen3_moe have no experts, and vLLM"
        with pytest.raises(ModelMismatchError, match=says):
            check_engine_parts(config, rollout)


def test_each_stage_of_an_engine_has_a_layer() -> None:
    config = LlamaConfig(num_hidden_layers=3)
    check_engine_parts(config, RolloutSpec(pipeline_parallel_size=3))
    says = (
        r"^rollout\.pipelineParallelSize 4 is above this llama's num_hidden_layers 3: each stage needs a layer, so use"
    )
    with pytest.raises(ModelMismatchError, match=says):
        check_engine_parts(config, RolloutSpec(pipeline_parallel_size=4))


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (Qwen3MoeConfig(), "qwen3_moe is a mixture of experts, and only dense models are tested"),
        (DeepseekV3Config(), "deepseek_v3 is a mixture of experts, and only dense models are tested"),
        # Without experts, as dense families with the same attention are.
        (DeepseekV3Config(n_routed_experts=0), r"deepseek_v3 has latent attention \(MLA, .*\), which is not tested"),
    ],
    ids=["experts", "both", "latent attention"],
)
def test_models_that_are_not_tested_in_fp8_are_refused_by_name(config: PretrainedConfig, what: str) -> None:
    check_quantization(config, None)
    with pytest.raises(
        ModelMismatchError, match=rf"^rollout\.quantization FP8: {what}.*: remove rollout\.quantization$"
    ):
        check_quantization(config, Quantization.FP8)


def test_dense_models_are_rounded_to_fp8() -> None:
    check_quantization(LlamaConfig(), Quantization.FP8)
