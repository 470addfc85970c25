"""The load-balancing loss of a mixture of experts, which an actor's update adds to its loss.

`maths.losses.balance_loss` has the formula. Its fractions are those of a micro-batch, as in transformers, over all
layers with experts together. A minibatch's loss is the mean over its micro-batches on all ranks, weighted by their
tokens. Called by the engine, for each micro-batch:

    begin  ─▶  forward pass: each router adds its choices and probabilities (`routing`)  ─▶  add  ─▶  backward pass

Gradient checkpointing computes the routers again in the backward pass; what they add then is dropped. Sequence-parallel
ranks have slices of the same tokens, and sum them up. It refuses nothing: the spec and the engine's owner have refused
models without experts, and compiled layers, from which no sum may leave on a side path.

Suffixes: E experts of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppojob_trainer.engines.train.batch import MicroBatch
from ppojob_trainer.engines.train.fsdp.routing import OBSERVER, routers
from ppojob_trainer.maths.losses import Loss, balance_loss

__all__ = ["LoadBalance"]

_METRIC = "router_aux_loss"


class LoadBalance:
    """See the module's docstring. coefficient: of the loss; with 0, nothing is computed."""

    def __init__(self, backbone: nn.Module, coefficient: float) -> None:
        self._coefficient = coefficient
        self._num_tokens = 1.0
        self._num_valid = 0
        self._is_open = False
        self._chosen: list[Tensor] = []
        self._probabilities: list[Tensor] = []
        if coefficient > 0:
            for _, router in routers(backbone):
                setattr(router, OBSERVER, self._observe)

    def begin_minibatch(self, num_tokens: float) -> None:
        """Take the number of tokens of the next minibatch, over all ranks."""
        self._num_tokens = num_tokens

    def begin(self, micro: MicroBatch) -> None:
        """Forget the micro-batch before; what the routers add from now on is of this one."""
        segments, size = micro.tokens.segments, micro.tokens.input_ids.shape[1]
        first = 0 if segments.peers is None else segments.peers.rank * size
        # The rest fills up the slices of a sequence-parallel group.
        self._num_valid = max(0, min(size, segments.num_tokens - first))
        self._chosen, self._probabilities, self._is_open = [], [], True

    def add(self, loss: Tensor, shares: dict[str, Tensor], micro: MicroBatch) -> Loss:
        """Add this micro-batch's share to a loss and its metrics; after its forward pass and before its backward."""
        self._is_open = False
        if self._coefficient == 0:
            return loss, shares
        peers, segments = micro.tokens.segments.peers, micro.tokens.segments
        num_rows = segments.num_tokens * len(self._chosen)
        chosen_E, probabilities_E = torch.stack(self._chosen).sum(0), torch.stack(self._probabilities).sum(0)
        if peers is not None:
            chosen_E, probabilities_E = peers.sum(chosen_E), peers.sum(probabilities_E)
        found = balance_loss(chosen_E / num_rows, probabilities_E / num_rows)
        share = found * (segments.num_tokens / self._num_tokens)
        return loss + self._coefficient * share, shares | {_METRIC: share.detach()}

    def _observe(self, probabilities_TE: Tensor, chosen_TK: Tensor) -> None:
        """Sum a router's probabilities, float32, and its choices over the tokens."""
        of_experts = probabilities_TE[: self._num_valid].sum(dim=0)
        if not self._is_open:
            return
        with torch.no_grad():
            chosen = chosen_TK[: self._num_valid].flatten()
            self._chosen.append(torch.zeros_like(of_experts).scatter_add_(0, chosen, torch.ones_like(chosen).float()))
        self._probabilities.append(of_experts)
