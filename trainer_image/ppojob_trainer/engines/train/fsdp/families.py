"""Refuses model families without tests, and settings that are not computed as HuggingFace computes them, by name.

Called by `engine` and `model` before anything is loaded, and by `commands.fetch` before weights are downloaded. The
forward pass on packed tokens is transformers' own up to three parts that are ours: attention, the output layer, and the
loss. A setting that changes one of these is refused here, because it would otherwise be left out in silence, and so is
a layer that looks at neighbouring tokens by other means than attention: it would see the sequence packed before it.
"""

from __future__ import annotations

from typing import Any, Final

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ppojob_trainer.engines.errors import ModelUnsupportedError
from ppojob_trainer.engines.train.model_fit import num_experts
from ppojob_trainer.models.support import FAMILIES

# Settings that change the result outside the supported computation, and their neutral values.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    # Log-probs must be the same each time they are computed.
    "attention_dropout": (None, 0, 0.0),
    "hidden_dropout": (None, 0, 0.0),
    "resid_pdrop": (None, 0, 0.0),
    "embd_pdrop": (None, 0, 0.0),
    "use_bidirectional_attention": (None, False),
    # Of mixtures of experts: random numbers in the router, and a loss that is not computed.
    "router_jitter_noise": (None, 0, 0.0),
    "output_router_logits": (None, False),
}
# Settings of which transformers or vLLM computes one value alone. The first one here is named in the message.
_OF_FAMILY: Final[dict[str, dict[str, tuple[object, ...]]]] = {
    "deepseek_v3": {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1, None),
        "rope_interleave": (True,),
        "attention_bias": (False,),
    },
    "gpt_oss": {
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
        "rms_norm_eps": (1e-5,),
        "tie_word_embeddings": (False,),
        "rope_type": ("yarn",),
        "mscale": (None,),
        "mscale_all_dim": (None,),
        "attention_factor": (None,),
        "partial_rotary_factor": (None, 1.0),
    },
}
_ROPE_OF_GPT_OSS: Final = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_ATTENTIONS: Final = frozenset({"full_attention", "sliding_attention"})
# Their angles depend on the longest sequence of a batch, which differs when the batch is packed.
_ROPE_OF_A_BATCH: Final = frozenset({"dynamic", "longrope"})


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Refuse a configuration with unsupported settings or parts.

    Raises:
        ModelUnsupportedError: names the family and the setting.
    """
    if config.model_type not in FAMILIES:
        _refuse_family(config)
    elif num_experts(config) is not None and not type(config).__module__.startswith("transformers.models."):
        raise ModelUnsupportedError(
            f"model path {config.name_or_path}: its {config.model_type} comes with code of its own, and no test "
            "compares the experts of such code: create another PPOJob with trustRemoteCode false in the model's "
            "section of spec.model, so that the code of transformers is used"
        )
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(config, name, None)) not in neutral:
            raise _refused(config, f"{name}={value}")
    _refuse_of_family(config)
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _ATTENTIONS:
            raise _refused(config, f"layers of type {kind}")
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one for each type of layer.
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if (kind := parameters.get("rope_type")) in _ROPE_OF_A_BATCH:
            raise _refused(config, f"rope_type={kind}")


def _refuse_of_family(config: PretrainedConfig) -> None:
    """Refuse settings that one of transformers and vLLM does not read."""
    settings = (getattr(config, "rope_parameters", None) or {}) | vars(config)
    for name, computed in _OF_FAMILY.get(config.model_type, {}).items():
        if (value := settings.get(name)) not in computed:
            wanted = f"no {name}" if computed[0] is None else f"{name}={computed[0]}"
            raise ModelUnsupportedError(
                f"{config.model_type} has {name}={value}, which trainer and vLLM compute differently: use a model "
                f"whose config.json has {wanted}"
            )
    if config.model_type == "gpt_oss":
        _refuse_of_gpt_oss(config)


def _refuse_of_gpt_oss(config: Any) -> None:
    """Refuse layers that vLLM computes otherwise, and angles whose settings it needs and does not get."""
    kinds = list(config.layer_types)
    if kinds != [("sliding_attention", "full_attention")[layer % 2] for layer in range(len(kinds))]:
        raise ModelUnsupportedError(
            f"gpt_oss has layer_types {', '.join(kinds[:4])}, ..., and vLLM computes sliding windows in every other "
            "layer, beginning with the first one: use a model whose layers have their windows there"
        )
    if missing := [name for name in _ROPE_OF_GPT_OSS if config.rope_parameters.get(name) is None]:
        raise ModelUnsupportedError(
            f"gpt_oss has no {missing[0]} in rope_parameters, which vLLM reads: use a model whose config.json has it"
        )


def _refuse_family(config: PretrainedConfig) -> None:
    """Refuse a family without tests, except one that only the checkpoint's own code knows."""
    known = f"use a model of one of the families {', '.join(FAMILIES)}"
    if num_experts(config) is not None:
        raise ModelUnsupportedError(
            f"{config.model_type} is a mixture of experts that is not supported, because no test compares it with "
            f"transformers: {known}"
        )
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelUnsupportedError(
            f"{config.model_type} is not a supported family, because no test compares it with transformers: {known}"
        )
    if not getattr(config, "auto_map", None):
        raise ModelUnsupportedError(f"{config.model_type} is not a causal language model of transformers: {known}")


def _refused(config: PretrainedConfig, what: str) -> ModelUnsupportedError:
    return ModelUnsupportedError(
        f"{config.model_type} has {what}, which is not supported: use a model whose config.json does not have it"
    )
