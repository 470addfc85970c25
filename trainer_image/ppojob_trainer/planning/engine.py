"""vLLM's share of a GPU: weights, key-value cache, and how many sequences fit into it. Called by `plan`. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from transformers import PretrainedConfig

from ppojob_api.v1alpha1.rollout import RolloutSpec
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.train.model_fit import (
    active_intermediate,
    cached_numbers,
    embedding_parameters,
    expert_numbers,
)
from ppojob_trainer.main.memory_fit import engine_weights
from ppojob_trainer.worker_groups.roles.trained import ModelSize

__all__ = ["EnginePlan", "cache_per_token", "layers_of_stage", "plan_engine", "policy_size"]

_BFLOAT16: Final = 2
_FLOAT32: Final = 4
_SAMPLING_COPIES: Final = 3
"""Copies of the logits while tokens are sampled: the logits, their softmax, and a sorted or masked one."""


@dataclass(frozen=True)
class EnginePlan:
    """One engine, in bytes of the fullest of its GPUs. working: estimate of activations and logits. receiving: of a
    layer's experts, which vLLM keeps while it receives weights until the layer is complete, whatever parts a GPU needs.

    cache_per_token: bytes of a token's keys and values. cache_tokens: that fit. num_sequences: that the cache holds
    with all their tokens, at most `rollout.maxNumSeqs`.
    """

    pool: str
    share: float
    weights: float
    working: float
    receiving: float
    cache_per_token: float
    cache_tokens: int
    num_sequences: int

    @property
    def fits(self) -> bool:
        """Whether the cache holds at least one sequence."""
        return self.num_sequences > 0


def policy_size(config: PretrainedConfig, num_parameters: int) -> ModelSize:
    """Return what decides about the weights on the GPUs of an engine."""
    text: Any = config.get_text_config()
    in_embeddings = embedding_parameters(config)
    return ModelSize(num_parameters, gpu_bytes=0, layers=text.num_hidden_layers, in_embeddings=in_embeddings)


def layers_of_stage(text: Any, rollout: RolloutSpec) -> int:
    """Return the layers of an engine's largest stage; `text` is the configuration of the language model."""
    return math.ceil(int(text.num_hidden_layers) / rollout.pipeline_parallel_size)


def cache_per_token(text: Any, rollout: RolloutSpec) -> float:
    """Return the bytes that a GPU of the largest stage caches for a token."""
    return layers_of_stage(text, rollout) * cached_numbers(text, rollout.tensor_parallel_size) * _BFLOAT16


def plan_engine(spec: PPOJobSpec, pool: str, config: PretrainedConfig, num_parameters: int, gpu: float) -> EnginePlan:
    """Return the plan of each engine in a pool; `gpu`: bytes of a GPU."""
    text: Any = config.get_text_config()
    rollout, parts = spec.rollout, spec.rollout.tensor_parallel_size
    per_token = cache_per_token(text, rollout)
    share = rollout.gpu_memory_utilization * gpu
    weights = engine_weights(rollout, policy_size(config, num_parameters))
    length = spec.data.max_prompt_length + spec.data.max_response_length
    tokens = min(max(rollout.max_num_batched_tokens, length), rollout.max_num_seqs * length)
    # Each expert of a token has its copy of the token, and a result. Whole experts may all be on one GPU.
    hidden = (8 + 2 * (getattr(text, "num_experts_per_tok", None) or 0)) * text.hidden_size
    inner = active_intermediate(text) // (1 if rollout.enable_expert_parallel else parts)
    layer = _BFLOAT16 * tokens * (hidden + 3 * inner)
    logits = _SAMPLING_COPIES * _FLOAT32 * rollout.max_num_seqs * text.vocab_size // parts
    room = max(0.0, share - weights - layer - logits)
    cached = int(room / per_token)
    receiving = float(_BFLOAT16 * expert_numbers(text))
    sequences = min(rollout.max_num_seqs, cached // length)
    return EnginePlan(pool, share, weights, layer + logits, receiving, per_token, cached, sequences)
