"""Mixtures of experts: how their matrices are multiplied, which share of them is active, and how evenly they are used.

transformers keeps a layer's experts in fused parameters of three dimensions [E, outputs, inputs], and calls them under
the name `IMPLEMENTATION`. Called by `model`, `lora`, `flops` and the engines. Experts are sharded like all other
parameters, by FSDP; there is no expert parallelism, no token is dropped, and no load-balancing loss is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from ppojob_trainer.engines.train.mesh import ParallelMesh

IMPLEMENTATION: Final = "ppojob_experts"
COUNTS: Final = "tokens_per_expert"
"""Name of the experts' buffer for the number of tokens of each expert."""


def count_and_multiply(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Apply each token's experts by grouped matrix products; in training, count the tokens of each expert.

    transformers chooses the kernel: grouped products on the CPU and on GPUs from compute capability 8.0, else one
    product for each expert.

    Args:
        hidden_states: [T, D]; top_k_index, top_k_weights: [T, K], the experts of each token and their weights.

    Returns:
        [T, D].
    """
    if module.training:
        with torch.no_grad():
            chosen = top_k_index.flatten()
            module.get_buffer(COUNTS).scatter_add_(0, chosen, torch.ones_like(chosen))
    output: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return output


def expert_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of each layer's fused experts."""
    for name, part in module.named_modules():
        if any(parameter.ndim == 3 for parameter in part.parameters(recurse=False)):
            yield name, part


def add_counts(model: nn.Module) -> None:
    """Give each layer's experts a buffer for the number of tokens; no checkpoint has it."""
    for _, experts in expert_modules(model):
        num_experts = next(experts.parameters(recurse=False)).shape[0]
        experts.register_buffer(COUNTS, torch.zeros(num_experts, dtype=torch.int64), persistent=False)


def imbalance_metrics(role: str, backbone: nn.Module, parallel: ParallelMesh) -> dict[str, float]:
    """Return how unevenly the updates since the last call used the experts; empty without experts. Collective.

    A layer's imbalance is the share of its busiest expert divided by the mean share: 1 if all are used equally, the
    number of experts divided by those per token if all tokens use the same ones. With sequence parallelism, the few
    tokens that fill up the ranks' slices count too.
    """
    counts = [experts.get_buffer(COUNTS) for _, experts in expert_modules(backbone)]
    if not counts:
        return {}
    tokens = parallel.sum_of_ranks(torch.stack(counts)).double()
    for count in counts:
        count.zero_()
    layers = tokens.amax(dim=1) / tokens.mean(dim=1)
    return {
        f"{role}/expert_imbalance/mean": float(layers.mean()),
        f"{role}/expert_imbalance/max": float(layers.max()),
    }


def active_share(parameter: nn.Parameter, config: PretrainedConfig) -> float:
    """Return which share of a parameter's numbers computes for a token: less than 1 for fused experts alone."""
    if parameter.ndim != 3:
        return 1.0
    return int(config.num_experts_per_tok) / parameter.shape[0]


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, count_and_multiply)
