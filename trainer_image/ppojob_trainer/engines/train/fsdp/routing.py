"""The routers of a mixture of experts: replay of the experts that the rollout engine chose, and how often they differ.

Routing replay (R3, Ma et al. 2025, arXiv 2510.11370): trainer and engine round differently, so where two experts score
almost the same, they choose different ones, and the log-probs of the same tokens are far apart. With the engine's
choice recorded, a router here takes it over, and weights the experts by its own scores of them:

    p = softmax(logits), of DeepSeek-V3 sigmoid(logits)
    g = p[recorded], divided by its sum if the model normalises it, times the model's factor; of gpt-oss
        softmax(logits[recorded])

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) chooses by p + bias, of some groups of experts alone, and weights by p.
The bias is a buffer: no gradient trains it, and it stays as it is in the checkpoint. So gradients reach the router
through the weights, as they do without replay. Called by `model` (the routers of a new model), `modules` (the experts
of a micro-batch), `layers` (those that are computed twice), `engine` and `balance` (an observer of all
choices). The recording stays with the routers until the next pass, because gradient checkpointing computes the layers
again. In a pipeline, other micro-batches come between, so the routers get the recording again before a backward pass. A
stage takes the part of its layers.

Suffixes: T tokens, K experts of a token, E experts of a layer, L layers, dense ones included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ppojob_trainer.engines.train.fsdp.token_slices import TokenSlices
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.model_fit import num_experts
from ppojob_trainer.protocol import Keys, ProtocolError

__all__ = [
    "OBSERVER",
    "choose_once",
    "differing_metrics",
    "prepare_routers",
    "replay_experts",
    "routers",
    "routers_of",
]

DIFFERING: Final = "differing_choices"
"""Name of a router's buffer: the number of the router's choices that were not recorded, and of all compared choices."""
OBSERVER: Final = "routing_observer"
"""Name of a router's attribute: a function that gets the probabilities [T, E] and the chosen experts [T, K] of each
training pass; None: there is none."""
_RECORDED: Final = "recorded_experts"
"""Name of a router's attribute: the experts to choose, integers [T, K], -1 where it chooses; None: it chooses all."""
_CHOSEN: Final = "chosen_experts"
"""Name of a router's attribute: a list with the experts that it has chosen in the first computation of its layer, int16
[T, K], empty during that; None: the layer is computed once."""
_SLICES: Final = "token_slices"
"""Name of a router's attribute: the slices of the tokens, of which it computes one; None: it computes all tokens."""
_COMPUTE: Final = "forward_of_family"
"""Name of a router's attribute: its forward pass without replay."""
_LEAST_SUM: Final = 1e-20
"""Added to the sum of a token's sigmoid scores, as in transformers."""


def _softmax(logits: Tensor) -> Tensor:
    return functional.softmax(logits, dtype=torch.float, dim=-1)


_SCORES: Final[Mapping[type[nn.Module], Callable[[Tensor], Tensor]]] = {
    DeepseekV3TopkRouter: torch.sigmoid,
    # It weights by the softmax of the chosen logits alone.
    GptOssTopKRouter: _softmax,
    MixtralTopKRouter: _softmax,
    Qwen3MoeTopKRouter: _softmax,
}
"""The scores of the experts [T, E] from a router's logits, float32."""


def prepare_routers(model: nn.Module, slices: TokenSlices | None = None) -> None:
    """Let the routers of a model take over recorded experts; nothing changes in a model without routers.

    Args:
        slices: of the tokens, of which the routers compute one; None: they compute all tokens.
    """
    for _, router in routers(model):
        setattr(router, _RECORDED, None)
        setattr(router, _CHOSEN, None)
        setattr(router, OBSERVER, None)
        setattr(router, _SLICES, slices)
        setattr(router, _COMPUTE, router.forward)
        router.register_buffer(DIFFERING, torch.zeros(2, dtype=torch.int64), persistent=False)
        router.forward = MethodType(_route, router)


def replay_experts(backbone: nn.Module, experts: Tensor | None) -> None:
    """Let the routers choose these experts in the next pass and its backward pass; None: their own.

    Args:
        experts: integers [T, L * K], -1 where the routers choose.

    Raises:
        ProtocolError: the recording is of another model.
    """
    config: Any = backbone.config
    if num_experts(config) is None:
        return
    found = list(routers(backbone))
    if not found:
        # Stages of a pipeline may have dense layers alone.
        return
    num_layers, per_token = len(backbone.get_submodule("layers")), int(found[0][1].top_k)  # type: ignore[arg-type]
    if experts is not None and experts.shape[1] != num_layers * per_token:
        raise ProtocolError(
            f"column {Keys.ROUTED_EXPERTS!r} has {experts.shape[1]} values for each token, and the model has "
            f"{num_layers} layers with {per_token} experts of a token: record the experts of the model that is trained"
        )
    slices: TokenSlices | None = getattr(found[0][1], _SLICES)
    if experts is not None and slices is not None:
        experts = experts[slices.place(len(experts))]
    of_layers = None if experts is None else experts.view(-1, num_layers, per_token)
    for layer, router in found:
        setattr(router, _RECORDED, None if of_layers is None else of_layers[:, layer])


@contextmanager
def choose_once(router: nn.Module, chosen: list[Tensor]) -> Iterator[None]:
    """Let a router choose in the first computation of its layer, and the same in the second one.

    Args:
        chosen: the same list for both computations, empty before the first one.
    """
    setattr(router, _CHOSEN, chosen)
    try:
        yield
    finally:
        setattr(router, _CHOSEN, None)


def differing_metrics(role: str, backbone: nn.Module, parallel: ParallelMesh) -> dict[str, float]:
    """Return the share of the routers' own choices since the last call that were not recorded. Collective.

    Of updates with recorded experts alone: empty without them. A choice is one expert of one token in one layer.
    """
    config: Any = backbone.config
    if num_experts(config) is None:
        return {}
    counts = [router.get_buffer(DIFFERING) for _, router in routers(backbone)]
    # Stages of a pipeline may have dense layers alone.
    mine = torch.stack(counts).sum(dim=0) if counts else torch.zeros(2, dtype=torch.int64)
    differing, compared = parallel.sum_of_ranks(mine).tolist()
    for count in counts:
        count.zero_()
    return {f"{role}/routing_differs": differing / compared} if compared else {}


def routers(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the number of the layer of each router, and the router."""
    layers = next((part for name, part in model.named_modules() if name.split(".")[-1] == "layers"), nn.ModuleList())
    for number, layer in enumerate(layers.children()):
        for router in routers_of(layer):
            yield number, router


def routers_of(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the router of a layer; dense layers have none."""
    return (part for part in layer.modules() if type(part) in _SCORES)


def _route(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As transformers' router: return logits [T, E], the weights of the chosen experts [T, K], and the experts."""
    logits, weights_TK, own_TK = getattr(router, _COMPUTE)(hidden_states)
    recorded: Tensor | None = getattr(router, _RECORDED)
    chosen: list[Tensor] | None = getattr(router, _CHOSEN)
    observer = getattr(router, OBSERVER) if router.training else None
    if recorded is None and chosen is None and observer is None:
        return logits, weights_TK, own_TK
    scores_TE, chosen_TK = _SCORES[type(router)](logits), own_TK
    if recorded is not None:
        chosen_TK = torch.where(recorded >= 0, recorded.to(own_TK.dtype), own_TK)
        if router.training:
            _count_differing(router.get_buffer(DIFFERING), own_TK, chosen_TK, recorded >= 0)
    if chosen:
        chosen_TK = chosen[0].to(own_TK.dtype)
    elif chosen is not None:
        chosen.append(chosen_TK.to(torch.int16))
    if recorded is not None or chosen is not None:
        # In both computations of a layer, which must save the same tensors.
        weights_TK = _weights(router, logits, scores_TE, chosen_TK).to(weights_TK.dtype)
    if observer is not None:
        observer(scores_TE, chosen_TK)
    return logits, weights_TK, chosen_TK


def _weights(router: Any, logits_TE: Tensor, scores_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    if isinstance(router, GptOssTopKRouter):
        return _softmax(logits_TE.gather(1, chosen_TK))
    weights_TK = scores_TE.gather(1, chosen_TK)
    # Mixtral always normalises.
    if getattr(router, "norm_topk_prob", True):
        least = _LEAST_SUM if isinstance(router, DeepseekV3TopkRouter) else 0.0
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + least)
    return weights_TK * getattr(router, "routed_scaling_factor", 1.0)


@torch.no_grad()
def _count_differing(counts: Tensor, own_TK: Tensor, chosen_TK: Tensor, is_recorded: Tensor) -> None:
    is_other = (own_TK.unsqueeze(2) != chosen_TK.unsqueeze(1)).all(dim=2) & is_recorded
    counts.add_(torch.stack([is_other.sum(), is_recorded.sum()]))
