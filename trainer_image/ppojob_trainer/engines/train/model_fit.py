"""Checks whether the models fit the job and each other, from their configurations and tokenizers alone.

Called by the checks of roles and engines, before any weights are loaded. It refuses models that would fail in the
middle of a step, or that would train on other tokens than intended.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from ppojob_api.v1alpha1.data import DataSpec
from ppojob_api.v1alpha1.model import ModelSpec
from ppojob_api.v1alpha1.rollout import Quantization, RolloutSpec
from ppojob_trainer.engines.errors import ModelMismatchError, ModelNotFoundError, ModelUnsupportedError
from ppojob_trainer.engines.train.dims import heads_and_context

__all__ = [
    "active_intermediate",
    "attention_width",
    "cached_numbers",
    "check_context",
    "check_engine_parts",
    "check_heads",
    "check_is_balanced",
    "check_is_mixture",
    "check_vocabulary",
    "context_length",
    "expert_numbers",
    "indivisible",
    "longest_input",
    "num_experts",
    "read_config",
    "refuse_quantized",
    "split_sequence",
]

_NUM_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WITHOUT_BALANCE: Final = frozenset({"deepseek_v3"})
# Kinds of rotary embeddings whose factor extends the longest sequence that the configuration gives.
_STRETCHING = {"yarn", "linear", "dynamic"}


def read_config(path: str, *, trust_remote_code: bool) -> PretrainedConfig:
    """Read a checkpoint's configuration.

    Raises:
        ModelNotFoundError: there is none.
        ModelUnsupportedError: the checkpoint is quantized.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        what = "is not a folder" if not folder.is_dir() else "has no config.json"
        raise ModelNotFoundError(
            f"model path {path} {what} where the trainer runs: write a HuggingFace checkpoint there, or create another "
            "PPOJob with the right path"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"model path {path} has no usable config.json: {error}") from error
    refuse_quantized(config, f"model path {path}")
    return config


def refuse_quantized(config: PretrainedConfig, name: str) -> None:
    """Refuse a checkpoint whose weights have scales beside them. name: of the model, in the message.

    Raises:
        ModelUnsupportedError: with the method.
    """
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method", "unknown method")
        how = " (docs/models-and-data.md, gpt-oss, has lines that write it)" if method == "mxfp4" else ""
        raise ModelUnsupportedError(
            f"{name} is quantized ({method}), and its weights would be read without their scales: use the checkpoint "
            f"in bfloat16{how}"
        )


def context_length(config: PretrainedConfig) -> int | None:
    """Return a model's context length in tokens; None if its configuration does not have it."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    if limit is None or rope.get("rope_type") not in _STRETCHING:
        return limit
    basis = rope.get("original_max_position_embeddings") or limit
    return max(int(limit), int(basis * float(rope.get("factor") or 1.0)))


def longest_input(config: PretrainedConfig) -> int | None:
    """Return the tokens that a model has positions for, None where its configuration does not say."""
    length: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if length and length > 0 else None


def active_intermediate(config: Any) -> int:
    """Return the inner size of a layer's MLP that a token uses, the larger of dense layers and of experts."""
    dense = int(getattr(config, "intermediate_size", None) or 0)
    per_token = int(getattr(config, "num_experts_per_tok", None) or 0)
    if not per_token:
        return dense
    per_token += int(getattr(config, "n_shared_experts", None) or 0)
    return max(dense, per_token * int(getattr(config, "moe_intermediate_size", None) or dense))


def expert_numbers(config: Any) -> int:
    """Return the numbers of all routed experts of a layer; 0 if the model is no mixture of experts."""
    inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 0
    return 3 * int(config.hidden_size) * int(inner) * (num_experts(config) or 0)


def attention_width(config: Any) -> float:
    """Return the numbers of all query heads of a token; of latent attention, the mean of those of queries and values.

    Scores take as many operations for each pair of tokens as a query head has numbers, and their products with the
    values as many as a value head has.
    """
    heads = int(config.num_attention_heads)
    if of_values := getattr(config, "v_head_dim", None):
        return heads * (int(config.qk_head_dim) + int(of_values)) / 2
    return heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def cached_numbers(config: Any, parts: int = 1) -> float:
    """Return the numbers that each of `parts` GPUs of an engine caches for a token and a layer.

    Keys and values of its heads; of latent attention the latent vector and the rotated part of the keys, on each GPU.
    """
    if latent := getattr(config, "kv_lora_rank", None):
        return float(int(latent) + int(config.qk_rope_head_dim))
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2.0 * max(1.0, heads / parts) * size


def check_context(role: str, path: str, config: PretrainedConfig, data: DataSpec) -> None:
    """Refuse prompts and responses that together are longer than the model's context.

    Raises:
        ModelMismatchError: with the numbers.
    """
    limit, prompt, response = context_length(config), data.max_prompt_length, data.max_response_length
    if limit is not None and prompt + response > limit:
        raise ModelMismatchError(
            f"the {role}'s model {path} takes at most {limit} tokens, and data.maxPromptLength {prompt} + "
            f"data.maxResponseLength {response} are {prompt + response}: lower one of them until their sum is {limit}, "
            "or use a model with a longer context"
        )


def num_experts(config: PretrainedConfig) -> int | None:
    """Return the number of experts of a layer; None if the model is no mixture of experts."""
    return next((int(number) for name in _NUM_EXPERTS if (number := getattr(config, name, None))), None)


def check_is_mixture(config: PretrainedConfig, field: str, value: object, remedy: str) -> None:
    """Check that a model has the experts that a field of the spec is about.

    Raises:
        ModelMismatchError: with the field and its value.
    """
    if num_experts(config.get_text_config()) is None:
        raise ModelMismatchError(f"{field} {value}: {config.model_type} is no mixture of experts: {remedy}")


def check_engine_parts(config: PretrainedConfig, rollout: RolloutSpec) -> None:
    """Check that the GPUs of an engine can divide a model: layers, heads, and experts if the spec asks for it.

    Of fewer key heads than GPUs, vLLM has copies, but for gpt-oss. Each GPU must hold equally many experts: vLLM 0.32
    places uneven numbers, but its kernels for Blackwell (TRT-LLM) would then take a GPU's experts for others.

    Raises:
        ModelMismatchError: with the field and its value.
    """
    text, size, field = config.get_text_config(), rollout.tensor_parallel_size, "rollout.enableExpertParallel"
    check_heads(text, "rollout.tensorParallelSize", size)
    if text.model_type == "gpt_oss":
        _check_engine_of_gpt_oss(text, rollout)
    if (stages := rollout.pipeline_parallel_size) > text.num_hidden_layers:
        raise ModelMismatchError(
            f"rollout.pipelineParallelSize {stages} is above this {text.model_type}'s num_hidden_layers "
            f"{text.num_hidden_layers}: each stage needs a layer, so use at most as many"
        )
    if text.model_type == "qwen3_moe" and (layers := _stage_without_experts(text, stages)):
        raise ModelMismatchError(
            f"rollout.pipelineParallelSize {stages}: layers {layers[0]} to {layers[-1]} of this qwen3_moe have no "
            "experts, and vLLM needs a layer with experts in each stage: use fewer stages"
        )
    if not rollout.enable_expert_parallel:
        return
    check_is_mixture(config, field, "true", "set it to false")
    if (number := num_experts(text) or 0) % size:
        remedy = f"{number}: use a divisor, or set {field} to false"
        raise ModelMismatchError(indivisible(text, "rollout.tensorParallelSize", size, "number of experts", remedy))


def _check_engine_of_gpt_oss(text: Any, rollout: RolloutSpec) -> None:
    """Check what vLLM 0.32 divides, and which of its kernels compute this family: some leave out sinks or the gate."""
    size, stages, field = rollout.tensor_parallel_size, rollout.pipeline_parallel_size, "rollout.tensorParallelSize"
    if (heads := int(text.num_key_value_heads)) % size:
        remedy = f"{heads}, of which vLLM has no copies: use a divisor"
        raise ModelMismatchError(indivisible(text, field, size, "num_key_value_heads", remedy))
    if (inner := int(text.intermediate_size)) % (size * stages):
        remedy = f"{inner} together with rollout.pipelineParallelSize {stages}: let their product be a divisor"
        raise ModelMismatchError(indivisible(text, field, size, "intermediate_size", remedy))
    for name, computed in {"moe_backend": ("auto", "triton"), "decode_context_parallel_size": (1,)}.items():
        if (value := rollout.engine_args.get(name, computed[0])) not in computed:
            raise ModelMismatchError(
                f"rollout.engineArgs.{name} {value}: vLLM then computes gpt_oss otherwise than the trainer: remove it"
            )


def _stage_without_experts(text: Any, stages: int) -> range | None:
    """Return the layers of the first of an engine's stages that has dense ones only; vLLM 0.32 divides them so.

    The stages have equally many. If some are left, the stages before the last one get one more each.
    """
    each, left = divmod(int(text.num_hidden_layers), stages)
    end = 0
    for stage in range(stages):
        begin, end = end, end + each + (stages - 1 - left <= stage < stages - 1)
        if all(_is_dense(text, layer) for layer in range(begin, end)):
            return range(begin, end)
    return None


def _is_dense(text: Any, layer: int) -> bool:
    """Whether a layer of Qwen3-MoE has no experts, as transformers' `Qwen3MoeDecoderLayer` decides it."""
    return layer in text.mlp_only_layers or (layer + 1) % text.decoder_sparse_step != 0


def check_quantization(config: PretrainedConfig, quantization: Quantization | None) -> None:
    """Check that the engine's rounding of a model is tested: of dense models without latent attention it is.

    vLLM 0.32 computes latent attention with matrices that it takes from the rounded weights of a layer, which no read
    of the layer's own parameters compares.

    Raises:
        ModelMismatchError: with the field and its value.
    """
    if quantization is None:
        return
    text = config.get_text_config()
    why = {
        "is a mixture of experts, and only dense models are tested": num_experts(text) is not None,
        "has latent attention (MLA, kv_lora_rank in its config.json), which is not tested in FP8": bool(
            getattr(text, "kv_lora_rank", None)
        ),
    }
    for reason, is_true in why.items():
        if is_true:
            raise ModelMismatchError(
                f"rollout.quantization {quantization}: {config.model_type} {reason}: remove rollout.quantization"
            )


def embedding_parameters(config: PretrainedConfig) -> int:
    """Return the number of parameters of a language model's embedding and output layer; tied ones count once."""
    text: Any = config.get_text_config()
    return int(text.vocab_size * text.hidden_size) * (1 if text.tie_word_embeddings else 2)


def check_is_balanced(config: PretrainedConfig, field: str, value: object, remedy: str) -> None:
    """Check that a model is a mixture of experts for which transformers has a load-balancing loss.

    Raises:
        ModelMismatchError: with the field and its value.
    """
    check_is_mixture(config, field, value, remedy)
    if config.model_type in _WITHOUT_BALANCE:
        raise ModelMismatchError(
            f"{field} {value}: transformers has no load-balancing loss for {config.model_type}, whose routers have a "
            f"bias for each expert: {remedy}"
        )


def check_heads(text: Any, field: str, size: int) -> None:
    """Check that a number of ranks divides the attention heads; `text` is the configuration of the language model.

    Raises:
        ModelMismatchError: with the field, its value and the number of heads.
    """
    heads = int(text.num_attention_heads)
    if heads % size:
        raise ModelMismatchError(indivisible(text, field, size, "num_attention_heads", f"{heads}: use a divisor"))


def indivisible(text: Any, field: str, size: int, what: str, number_and_remedy: str) -> str:
    """Return the sentence for a size that does not divide a part of the model."""
    return f"{field} {size} does not divide this {text.model_type}'s {what} {number_and_remedy}"


def check_vocabulary(role: str, path: str, config: PretrainedConfig, model: ModelSpec) -> None:
    """Refuse a model that reads the actor's token ids as other tokens. One without a tokenizer must have room for them.

    Raises:
        ModelMismatchError: with the number of tokens that differ and one of them.
    """
    actor_path = model.actor.path
    # Only the actor's folder may run remote code: if this tokenizer needs its own, only the sizes are compared.
    actor, own = _vocabulary(actor_path, model.actor.trust_remote_code), _vocabulary(path, False)
    if actor is None:
        return
    size = config.get_text_config().vocab_size
    if max(actor.values()) >= size:
        raise ModelMismatchError(
            f"the {role}'s model {path} has {size} tokens, and the actor's tokenizer in {actor_path} writes ids up to "
            f"{max(actor.values())}: use a model with the actor's vocabulary"
        )
    differing = [token for token, number in actor.items() if own is not None and own.get(token) != number]
    if own is not None and differing:
        token = min(differing, key=actor.__getitem__)
        raise ModelMismatchError(
            f"the {role}'s model {path} has another vocabulary than the actor's {actor_path}: {len(differing)} of "
            f"{len(actor)} tokens differ, such as {token!r} ({actor[token]} for the actor, {own.get(token)} for the "
            f"{role}): use a model with the actor's vocabulary"
        )


def _vocabulary(path: str, trust_remote_code: bool) -> dict[str, int] | None:
    """Return token -> id; None where the folder holds no tokenizer that can be read."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError):
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary or None


def split_sequence(
    config: PretrainedConfig, size: int, tensor: int = 1, per_host: int | None = None
) -> tuple[int, int]:
    """Split a role's sequenceParallelSize for its model: ranks that divide heads, and ranks that gather keys.

    Args:
        tensor: tensorParallelSize; each of these ranks has a part of the heads.
        per_host: the role's ranks on a host; None: all of them.
    """
    text: Any = config.get_text_config()
    queries = int(text.num_attention_heads)
    keys = int(getattr(text, "num_key_value_heads", None) or queries)
    # If they are not divisible, the check of tensor parallelism says so.
    of_a_host = None if per_host is None else max(1, per_host // tensor)
    return heads_and_context(size, max(1, queries // tensor), max(1, keys // tensor), of_a_host)
