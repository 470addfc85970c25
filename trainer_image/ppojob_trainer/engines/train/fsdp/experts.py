"""Mixtures of experts: how their matrices are multiplied, which share of them is active, and how evenly they are used.

transformers keeps a layer's experts in fused parameters of three dimensions [E, outputs, inputs], and calls them under
the name `IMPLEMENTATION`. Called by `model`, `lora`, `flops` and the engines. Experts are sharded like all other
parameters, by FSDP; with expert parallelism each rank owns some of them whole (`train.expert`), and FSDP shards these
over the other ranks that own them. Tensor-parallel ranks count among all of these, because each computes a slice of the
tokens (`token_slices`). No token is dropped. `routing` has the routers, `balance` a loss of their choices.

Suffixes: T tokens, K experts of a token, S rows, one for each token and expert that is computed here, D size of the
hidden states, E experts of a layer, R ranks that divide them, N tokens that are sent or received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ppojob_trainer.engines.train.expert import ExpertPeers, Route
from ppojob_trainer.engines.train.fsdp.expert_rows import Rows, collect, spread
from ppojob_trainer.engines.train.fsdp.grouped_experts import multiply
from ppojob_trainer.engines.train.fsdp.low_rank import ExpertProjection
from ppojob_trainer.engines.train.fsdp.stages import layer_number
from ppojob_trainer.engines.train.fsdp.tensor_parallel import WithParts, divide_parameters, local
from ppojob_trainer.engines.train.fsdp.token_slices import TokenSlices
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.model_fit import num_experts

IMPLEMENTATION: Final = "ppojob_experts"
COUNTS: Final = "tokens_per_expert"
"""Name of the experts' buffer for the number of tokens of each expert."""
_PEERS: Final = "expert_peers"
"""Name of the experts' attribute with the ranks over which they are divided."""
_PLANS: Final = "expert_plans"
"""Name of the experts' attribute: a list with the plan of the first computation of their layer, empty during that;
None: the layer is computed once, or chooses again."""


@dataclass(frozen=True)
class _Plan:
    """Which rows the experts of this rank compute for some tokens, and how the tokens get here.

    own: the rows of the tokens that are here, or that have been received. ends_E: after which row those of each expert
    end, int32. sent: the rows that this rank sends, by `route`; None: all experts are here.
    """

    own: Rows
    ends_E: Tensor
    sent: Rows | None = None
    route: Route | None = None


def count_and_multiply(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Apply each token's experts by grouped matrix products; in training, count the tokens of each expert.

    Args:
        hidden_states: [T, D]; top_k_index, top_k_weights: [T, K], the experts of each token and their weights.

    Returns:
        [T, D].
    """
    peers: ExpertPeers | None = getattr(module, _PEERS, None)
    kept: list[_Plan] | None = getattr(module, _PLANS, None)
    if kept:
        plan = kept[0]
    else:
        plan = _planned(module, peers, top_k_index)
        if kept is not None:
            kept.append(plan)
    if peers is None or plan.sent is None or plan.route is None:
        return _apply(module, hidden_states, top_k_weights, plan)
    received_NK = peers.dispatch(spread(top_k_weights, plan.sent), plan.route)
    received_ND = peers.dispatch(spread(hidden_states, plan.sent), plan.route)
    own = WithParts(module, {name: local(part) for name, part in module.named_parameters(recurse=False)})
    summed_ND = _apply(own, received_ND, received_NK, plan)
    return collect(peers.combine(summed_ND, plan.route), plan.sent)


@torch.no_grad()
def _planned(module: nn.Module, peers: ExpertPeers | None, chosen_TK: Tensor) -> _Plan:
    """Plan the rows of these choices; collective, if other ranks have some of the experts.

    A rank gets a token once, with all choices of it, and returns the weighted sum of its own experts.
    """
    total, chosen = module.get_buffer(COUNTS), chosen_TK.flatten()
    counts_E = torch.zeros_like(total).scatter_add_(0, chosen, torch.ones_like(chosen))
    if module.training:
        total.add_(counts_E)
    if peers is None:
        return _Plan(Rows.sorted_by(chosen_TK, len(counts_E)), counts_E.cumsum(0, dtype=torch.int32))
    num_own = len(counts_E) // peers.size
    is_sent_TR = chosen_TK.new_zeros(len(chosen_TK), peers.size).scatter_(1, chosen_TK // num_own, 1)
    ranks = torch.arange(peers.size, device=chosen_TK.device)
    # Before the host waits for the sizes: until then, the GPU has work, and it waits for whatever comes after that.
    every = Rows.sorted_by(torch.where(is_sent_TR > 0, ranks, peers.size), peers.size)
    # Gloo and NCCL send no 16 bits.
    chosen_of_every = chosen_TK.int()[every.tokens]
    route = peers.route(is_sent_TR.sum(dim=0), counts_E, *chosen_TK.shape)
    sent = every.first(sum(route.sent))
    chosen_NK = peers.dispatch(chosen_of_every[: len(sent.tokens)], route) - peers.rank * num_own
    keys_NK = torch.where((chosen_NK >= 0) & (chosen_NK < num_own), chosen_NK, num_own)
    own = Rows.sorted_by(keys_NK, num_own).first(route.num_rows)
    return _Plan(own, route.counts_e.cumsum(0, dtype=torch.int32), sent, route)


def _apply(experts: Any, tokens_TD: Tensor, weights_TK: Tensor, plan: _Plan) -> Tensor:
    """Apply experts of this rank to tokens that are here; return the sum of each token's results, [T, D]."""
    weights_S = weights_TK.flatten().gather(0, plan.own.choices)
    results_SD = multiply(experts, spread(tokens_TD, plan.own), weights_S, plan.ends_E)
    return collect(results_SD, plan.own).to(tokens_TD.dtype)


@contextmanager
def plan_once(experts: nn.Module, plans: list[_Plan]) -> Iterator[None]:
    """Let experts plan their rows in the first computation of their layer, and use that in the second one.

    The choices of both must be the same ones (`routing.choose_once`). The second computation then exchanges no sizes,
    for which the host would wait, and sorts nothing. A plan takes 24 bytes for each row and for each token that is
    sent, and 8 for each token that is here before and after the exchange.

    Args:
        plans: the same list for both computations, empty before the first one.
    """
    setattr(experts, _PLANS, plans)
    try:
        yield
    finally:
        setattr(experts, _PLANS, None)


def divide_experts(module: nn.Module, parallel: ParallelMesh) -> None:
    """Divide the experts of each layer over the ranks of their group, and the tokens of their blocks over the
    tensor-parallel ranks; where there are none, do nothing. Before FSDP."""
    peers, slices = parallel.experts, TokenSlices.of(parallel)
    for name, experts in list(expert_modules(module)):
        if slices is not None:
            slices.apply(module.get_submodule(name.rpartition(".")[0]))
        if peers is not None and peers.size > 1:
            setattr(experts, _PEERS, peers)
            divide_parameters(experts, peers.mesh, lambda _: Shard(0))


def ready_parameters(module: nn.Module, parallel: ParallelMesh, precision: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Return the parameters that FSDP leaves as they are: whole on this rank, not trained, in the computation's dtype.

    FSDP would gather them from this rank alone, into a second copy. Before it shards the module.
    """
    peers = parallel.experts
    of_experts = () if peers is None else (part for _, part in expert_modules(module))
    in_experts = {parameter for part in of_experts for parameter in part.parameters()}
    owns_experts = peers is not None and _owns_alone(peers)

    def is_ready(one: nn.Parameter) -> bool:
        is_whole = owns_experts if one in in_experts else parallel.dims.fsdp == 1
        return is_whole and not one.requires_grad and one.dtype == precision.param_dtype

    return set(filter(is_ready, module.parameters()))


def shard_experts(
    layers: Sequence[nn.Module],
    parallel: ParallelMesh,
    precision: MixedPrecisionPolicy,
    left: set[nn.Parameter],
    *,
    stays_gathered: bool,
) -> None:
    """Shard the experts of some layers over the ranks that own the same ones, in one message.

    Args:
        left: parameters that FSDP leaves as they are (`ready_parameters`).
    """
    peers, experts = parallel.experts, [part for layer in layers for _, part in expert_modules(layer)]
    # Adapters of experts that are left have gradients.
    sharded = [part for part in experts if not left.issuperset(part.parameters())]
    if peers is None or not sharded:
        return
    owns_alone = _owns_alone(peers)
    fully_shard(
        sharded,
        mesh=peers.fsdp_mesh,
        # The hidden states have been cast with their layer's. Weights of experts are float32 in some families, and stay
        # so, as in the layouts that do not shard experts separately.
        mp_policy=replace(precision, cast_forward_inputs=False),
        reshard_after_forward=not owns_alone and not stays_gathered,
        ignored_params=left,
    )
    for part in sharded:
        assert isinstance(part, FSDPModule)
        # An expert's gradient is a sum over the tokens of its group already, but the loss is multiplied by all ranks.
        part.set_gradient_divide_factor(parallel.num_averaged)
        if not owns_alone:
            # Gloo cannot multiply while it sums. With one rank, torch 2.13 would divide twice.
            part.set_force_sum_reduction_for_comms(True)


def _owns_alone(peers: ExpertPeers) -> bool:
    """Whether no other rank of a copy of the model owns experts of this rank."""
    return peers.fsdp_mesh.size(-1) == 1


def expert_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of each layer's fused experts."""
    for name, part in module.named_modules():
        is_adapter = isinstance(part, ExpertProjection)
        if not is_adapter and any(parameter.ndim == 3 for parameter in part.parameters(recurse=False)):
            yield name, part


def add_counts(model: nn.Module) -> None:
    """Give each layer's experts a buffer for the number of tokens; no checkpoint has it."""
    for _, experts in expert_modules(model):
        num_experts = next(experts.parameters(recurse=False)).shape[0]
        experts.register_buffer(COUNTS, torch.zeros(num_experts, dtype=torch.int64), persistent=False)


def imbalance_metrics(role: str, backbone: nn.Module, parallel: ParallelMesh) -> dict[str, float]:
    """Return how unevenly the updates since the last call used the experts; empty without experts. Collective.

    `expert_idle_share` is the share of all layers' experts that no token used.

    A layer's imbalance is the share of its busiest expert divided by the mean share: 1 if all are used equally, the
    number of experts divided by those per token if all tokens use the same ones. With sequence parallelism, the few
    tokens that fill up the ranks' slices count too.
    """
    config: Any = backbone.config
    if (size := num_experts(config)) is None:
        return {}
    counts = {layer_number(name): experts.get_buffer(COUNTS) for name, experts in expert_modules(backbone)}
    # Of all layers, because another pipeline stage has others. Those without experts have no tokens.
    tokens = torch.zeros(config.num_hidden_layers, size, dtype=torch.int64)
    if counts:
        tokens[list(counts)] = torch.stack(list(counts.values())).cpu()
    tokens = parallel.sum_of_ranks(tokens).double()
    for count in counts.values():
        count.zero_()
    tokens = tokens[tokens.any(dim=1)]
    layers = tokens.amax(dim=1) / tokens.mean(dim=1)
    return {
        f"{role}/expert_imbalance/mean": float(layers.mean()),
        f"{role}/expert_imbalance/max": float(layers.max()),
        f"{role}/expert_idle_share": float((tokens == 0).double().mean()),
    }


def active_share(name: str, shape: Sequence[int], config: PretrainedConfig) -> float:
    """Return which share of the numbers of a parameter computes for a token: less than 1 for fused experts and their
    biases alone.

    Args:
        name: in the model or in a part of it that has whole layers.
    """
    is_bias = ".experts." in name and name.endswith("_bias")
    if len(shape) != 3 and not is_bias:
        return 1.0
    return int(config.num_experts_per_tok) / shape[0]


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, count_and_multiply)
