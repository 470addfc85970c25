"""Each family computes as HuggingFace computes it; what would be computed otherwise is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA, TrainedModel
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.errors import ModelMismatchError, ModelUnsupportedError
from ppojob_trainer.engines.train.batch import MicroBatchPlan, build_micro_batches, widest
from ppojob_trainer.engines.train.fsdp.divisions import check_divisions
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.families import refuse_unsupported
from ppojob_trainer.engines.train.fsdp.model import LoadOptions, load_policy
from ppojob_trainer.engines.train.fsdp.passes import Received
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.pipeline import PipelinePeers
from ppojob_trainer.models import support
from ppojob_trainer.models.support import Support
from ppojob_trainer.protocol import DataProto, Keys
from tests.unit.trainer.engines.fsdp_engines import critic_engine, policy_engine, reference_engine
from tests.unit.trainer.engines.tiny_experts import MIXTURES, fill_biases, saved
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH, VOCABULARY
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    **MIXTURES["deepseek_v3"].settings,
    "num_experts_per_tok": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
SHORT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
GPT_OSS: dict[str, Any] = {
    **MIXTURES["gpt_oss"].settings,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "rope_parameters": SHORT_YARN,
}
NO_CAPS = {"final_logit_softcapping": None, "attn_logit_softcapping": None}
# The batches' sequences have up to 16 tokens, so a window of 4 hides most of the longer ones.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows above layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 4}),
    "gemma": ("gemma", {}),
    "gemma2 without caps": ("gemma2", {**NO_CAPS, "sliding_window": 4, "query_pre_attn_scalar": 12}),
    "gemma3": ("gemma3_text", {"sliding_window": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 12}),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    # The last layer does not rotate queries and keys.
    "smollm3": ("smollm3", {"no_rope_layer_interval": 3}),
    "glm4": ("glm4", {}),
    "deepseek v3": ("deepseek_v3", LATENT),
    "deepseek v3 with yarn and whole queries": (
        "deepseek_v3",
        {**LATENT, "rope_parameters": YARN, "q_lora_rank": None, "first_k_dense_replace": 0, "norm_topk_prob": False},
    ),
    "gpt oss": ("gpt_oss", GPT_OSS),
    "gpt oss with long windows": (
        "gpt_oss",
        {**GPT_OSS, "sliding_window": 64, "rope_parameters": {**SHORT_YARN, "factor": 2.0}},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral window": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 4}),
    "qwen3 moe": ("qwen3_moe", EXPERTS),
    "qwen3 moe with a dense layer": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False}),
}


@pytest.fixture(params=FAMILIES, ids=lambda name: name.replace(" ", "-"), scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_family(tmp_path_factory.mktemp("families") / FAMILIES[request.param][0], request.param)


def save_tiny_family(folder: Path, name: str) -> Path:
    """Write a random model with the settings of `FAMILIES`."""
    family, settings = FAMILIES[name]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPE, **settings}))
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith("bias"):
            # Begin at 0 or 1, where a mistake would not be seen.
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().flatten()[0]), std=0.2)
    fill_biases(model)
    return saved(model, folder)


def make_policy(
    parallel: ParallelMesh, path: Path, lora: LoRA | None = None, dtype: torch.dtype = torch.float32
) -> FSDPEngine:
    training = ActorSpec(learning_rate=1e-3, max_tokens_per_gpu=40)
    model = ActorModel(path=str(path), lora=lora)
    return policy_engine(parallel, model, training, AlgorithmSpec(), total_steps=9, dtype=dtype)


def plain(auto: Any, path: Path, batch: DataProto) -> Any:
    """Padded, by the family's own attention in the open."""
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(**padded_inputs(batch), use_cache=False)


def test_log_probs_equal_those_of_the_familys_own_logits(parallel: ParallelMesh, path: Path, batch: DataProto) -> None:
    responses, mask = padded_responses(batch), batch.padded(Keys.RESPONSE_MASK)
    logits = plain(AutoModelForCausalLM, path, batch).logits
    log_p = torch.log_softmax(response_part(logits, responses.shape[1]) / 0.7, dim=-1)
    expected = log_p.gather(-1, responses.unsqueeze(-1)).squeeze(-1) * mask
    engine = make_policy(parallel, path)
    computed = engine.forward(batch).padded(Keys.OLD_LOG_PROBS)
    torch.testing.assert_close(computed, expected, atol=1e-4, rtol=1e-4)
    before = {name: value.detach().full_tensor().clone() for name, value in engine.module.named_parameters()}
    engine.update(batch)
    unchanged = [
        name for name, value in engine.module.named_parameters() if torch.equal(value.full_tensor(), before[name])
    ]
    assert not unchanged


def test_frozen_weights_compute_in_bfloat16_as_trained_ones(
    parallel: ParallelMesh, path: Path, batch: DataProto
) -> None:
    """Both are float32 in the file. Frozen ones are rounded when they are loaded, trained ones at each use."""
    trained, reference = (
        make_policy(parallel, path, dtype=torch.bfloat16),
        reference_engine(parallel, str(path), max_tokens_per_gpu=40, dtype=torch.bfloat16),
    )
    assert {value.dtype for value in trained.module.parameters()} == {torch.float32}
    found = (engine.forward(batch).padded(Keys.OLD_LOG_PROBS) for engine in (trained, reference))
    torch.testing.assert_close(*found, atol=0, rtol=0)


def test_values_are_of_the_same_backbone(parallel: ParallelMesh, path: Path, batch: DataProto) -> None:
    weight = torch.randn(1, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(5))
    head = path / "value_head.safetensors"
    save_file({"score.weight": weight}, head)
    critic = critic_engine(
        parallel,
        TrainedModel(),
        str(path),
        CriticSpec(max_tokens_per_gpu=40),
        total_steps=9,
        seed=1,
        dtype=torch.float32,
    )
    head.unlink()
    values = critic.forward(batch).padded(Keys.VALUES)
    hidden = plain(AutoModel, path, batch).last_hidden_state
    expected = response_part(hidden @ weight.T, values.shape[1]).squeeze(-1) * batch.padded(Keys.RESPONSE_MASK)
    torch.testing.assert_close(values, expected, atol=2e-4, rtol=1e-4)


def test_the_export_is_read_back_by_transformers(
    parallel: ParallelMesh, path: Path, batch: DataProto, tmp_path: Path
) -> None:
    make_policy(parallel, path).export(tmp_path / "export")
    rounded = tmp_path / "rounded"
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(rounded)
    exported, expected = (
        plain(AutoModelForCausalLM, folder, batch).logits for folder in (tmp_path / "export", rounded)
    )
    torch.testing.assert_close(exported, expected, atol=0, rtol=0)


def test_stages_compute_what_the_whole_model_computes(parallel: ParallelMesh, path: Path, batch: DataProto) -> None:
    config = AutoConfig.from_pretrained(path)
    check_divisions(config, {"actor.pipelineParallelSize": 2})
    plan = MicroBatchPlan(1, 999)
    (micro,) = build_micro_batches(batch, plan, (), RESPONSE_LENGTH, parallel.device)
    options = LoadOptions(dtype=torch.float32)
    whole = load_policy(str(path), options, parallel)(micro.tokens, 0.7)
    group = torch.distributed.group.WORLD
    assert group is not None
    hidden = None
    for stage in (0, 1):
        own = replace(parallel, pipeline=PipelinePeers(group, stage, 2))
        # Messages are wider than this micro-batch.
        received = Received(hidden, widest(batch, plan) + 5, stage, is_last=stage == 1)
        module = load_policy(str(path), options, own)
        hidden, *others = module(micro.tokens, 0.7, received)
    torch.testing.assert_close((hidden, *others), whole, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "gemma2",
            {},
            r"gemma2 has final_logit_softcapping=30\.0, which is not supported: use a model whose config.json",
        ),
        ("gemma2", {"final_logit_softcapping": None}, r"attn_logit_softcapping=50\.0"),
        ("llama", {"attention_dropout": 0.1}, r"llama has attention_dropout=0\.1"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type=dynamic"),
        ("qwen3", {"layer_types": ["linear_attention"], "num_hidden_layers": 1}, "layers of type linear_attention"),
        ("qwen3_moe", {"output_router_logits": True}, "qwen3_moe has output_router_logits=True"),
        ("deepseek_v3", {}, r"deepseek_v3 has scoring_func=None, .*: use a model .* has scoring_func=sigmoid"),
        ("deepseek_v3", {"scoring_func": "sigmoid"}, "deepseek_v3 has topk_method=None"),
        ("deepseek_v3", {**LATENT, "moe_layer_freq": 2}, "deepseek_v3 has moe_layer_freq=2"),
        ("deepseek_v3", {**LATENT, "rope_interleave": False}, "deepseek_v3 has rope_interleave=False"),
        ("deepseek_v3", {**LATENT, "attention_bias": True}, "deepseek_v3 has attention_bias=True"),
        ("qwen3_moe", {"router_jitter_noise": 0.1}, r"qwen3_moe has router_jitter_noise=0\.1"),
        ("gpt_oss", {"swiglu_limit": 8.0}, r"gpt_oss has swiglu_limit=8\.0, .*: use a model .* has swiglu_limit=7\.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, r"gpt_oss has swiglu_alpha=1\.0"),
        ("gpt_oss", {"attention_bias": False}, "gpt_oss has attention_bias=False"),
        ("gpt_oss", {"rms_norm_eps": 1e-6}, "gpt_oss has rms_norm_eps=1e-06, .* has rms_norm_eps=1e-05"),
        ("gpt_oss", {"tie_word_embeddings": True}, "gpt_oss has tie_word_embeddings=True"),
        (
            "gpt_oss",
            {"rope_parameters": {name: value for name, value in SHORT_YARN.items() if name != "beta_slow"}},
            "gpt_oss has no beta_slow in rope_parameters",
        ),
        (
            "gpt_oss",
            {"layer_types": ["full_attention"] * 36},
            "gpt_oss has layer_types full_attention, .* in every other",
        ),
        (
            "gpt_oss",
            {"rope_parameters": {**SHORT_YARN, "mscale": 0.7}},
            r"gpt_oss has mscale=0\.7, .*: use .* no mscale$",
        ),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "gpt_oss has rope_type=default"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=message):
        refuse_unsupported(AutoConfig.for_model(family, **settings))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("cohere", "cohere is not a supported family, because no test compares it with transformers"),
        ("mamba", "mamba is not a supported family"),
        ("olmoe", "olmoe is a mixture of experts that is not supported"),
        ("llama4_text", "llama4_text is a mixture of experts that is not supported"),
        ("t5", "t5 is not a causal language model of transformers"),
    ],
)
def test_a_family_without_tests_is_refused_with_those_that_have_them(family: str, message: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=f"^{message}") as raised:
        refuse_unsupported(AutoConfig.for_model(family))
    assert str(raised.value).endswith(f": use a model of one of the families {', '.join(support.FAMILIES)}")


@pytest.mark.parametrize("family", ["olmoe", "cohere"])
def test_code_in_the_checkpoint_does_not_make_a_known_family_a_tested_one(family: str) -> None:
    with pytest.raises(ModelUnsupportedError, match=f"^{family} is "):
        refuse_unsupported(AutoConfig.for_model(family, auto_map={"AutoModelForCausalLM": "modeling.Model"}))


def test_code_of_a_checkpoint_is_refused_for_a_mixture_of_a_known_family() -> None:
    class OwnConfig(type(AutoConfig.for_model("qwen3_moe"))):  # type: ignore[misc]
        """As from a checkpoint's own module."""

    with pytest.raises(
        ModelUnsupportedError,
        match=r"comes with code of its own, and .*: create another PPOJob with trustRemoteCode false",
    ):
        refuse_unsupported(OwnConfig())


def test_the_table_has_the_families_of_these_tests() -> None:
    assert set(support.FAMILIES) == {family for family, _ in FAMILIES.values()}


@pytest.mark.parametrize("column", ["lora", "pipeline"])
def test_the_table_has_adapters_and_pipelines_of_the_families_of_these_tests(column: str) -> None:
    """The tests of stages, and those of adapters on the attention, are for each of them."""
    tested = {name for name, family in support.FAMILIES.items() if getattr(family, column) is Support.TESTED}
    assert tested == {family for family, _ in FAMILIES.values()}


def test_the_table_has_the_families_that_are_refused_with_tensor_parallelism() -> None:
    refused = {name for name in support.FAMILIES if has_no_division(name)}
    assert {name for name, family in support.FAMILIES.items() if family.tensor_parallel is Support.REFUSED} == refused


def has_no_division(family: str) -> bool:
    try:
        check_divisions(AutoConfig.for_model(family, **SHAPE), {"actor.tensorParallelSize": 2})
    except ModelMismatchError as error:
        return f"tensor parallelism of {family} is not supported" in str(error)
    return False


def test_adapters_are_trained_and_begin_as_the_model(parallel: ParallelMesh, path: Path, batch: DataProto) -> None:
    plain_policy = make_policy(parallel, path)
    expected = plain_policy.forward(batch).padded(Keys.OLD_LOG_PROBS)
    target = {"phi3": "qkv_proj", "deepseek_v3": "o_proj"}.get(path.name, "q_proj")
    engine = make_policy(parallel, path, LoRA(rank=4, target_modules=[target]))
    torch.testing.assert_close(engine.forward(batch).padded(Keys.OLD_LOG_PROBS), expected)
    names = [spec.name for spec in engine.weights().specs()]
    assert names == [spec.name for spec in plain_policy.weights().specs()]

    engine.update(batch)

    merged = dict(zip(names, (tensor.clone() for tensor in engine.weights().gather()), strict=True))
    frozen = dict(zip(names, (tensor.clone() for tensor in plain_policy.weights().gather()), strict=True))
    changed = {name for name in names if not torch.equal(merged[name], frozen[name])}
    assert changed == {name for name in names if name.endswith(f".{target}.weight")}
    frozen_part = engine.forward(batch, with_adapters=False).padded(Keys.OLD_LOG_PROBS)
    assert torch.equal(frozen_part, expected), "the reference is not the model without its adapters"
