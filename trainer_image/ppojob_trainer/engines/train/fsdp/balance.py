"""The load-balancing loss of a mixture of experts, which an actor's update adds to its loss.

`maths.losses.balance_loss` has the formula. Its fractions are those of a micro-batch, as in transformers, over all
layers with experts together. A minibatch's loss is the mean over its micro-batches on all ranks, weighted by their
tokens. Called by the engine, for each micro-batch:

    begin  ─▶  forward pass: each router adds its choices and probabilities (`routing`)  ─▶  add  ─▶  backward pass

Gradient checkpointing computes the routers again in the backward pass; what they add then is dropped. Sequence- and
tensor-parallel ranks have slices of the same tokens, and sum them up.

The loss multiplies two sums over all layers, so it is no sum over the stages of a pipeline. A stage sends both sums
over its layers and all earlier ones with its hidden states. The last stage has the loss, and its gradient comes back
with that of the hidden states. It refuses nothing: the spec and the engine's owner have refused models without experts,
and compiled layers, from which no sum may leave on a side path.

Suffixes: E experts of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ppojob_trainer.engines.train.batch import MicroBatch
from ppojob_trainer.engines.train.fsdp.routing import OBSERVER, routers
from ppojob_trainer.engines.train.fsdp.token_slices import TokenSlices
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.model_fit import num_experts
from ppojob_trainer.maths.losses import Loss, balance_loss

__all__ = ["LoadBalance"]

_METRIC = "router_aux_loss"


class LoadBalance:
    """See the module's docstring. coefficient: of the loss; with 0, nothing is computed.

    none: the sums of no layers, float32 [2, E]; None if nothing is computed.
    """

    none: Tensor | None = None

    def __init__(self, backbone: nn.Module, coefficient: float, parallel: ParallelMesh) -> None:
        self._coefficient, self._slices = coefficient, TokenSlices.of(parallel)
        self._num_tokens = 1.0
        self._num_valid = 0
        self._is_open = False
        self._sums: list[Tensor] = []
        if coefficient > 0:
            config: Any = backbone.config
            self._per_token = int(config.num_experts_per_tok)
            self.none = torch.zeros(2, num_experts(config) or 0, device=parallel.device)
            for _, router in routers(backbone):
                setattr(router, OBSERVER, self._observe)

    def begin_minibatch(self, num_tokens: float) -> None:
        """Take the number of tokens of the next minibatch, over all ranks."""
        self._num_tokens = num_tokens

    def begin(self, micro: MicroBatch, earlier: Tensor | None = None) -> None:
        """Forget the micro-batch before; what the routers add from now on is of this one.

        Args:
            earlier: what earlier stages of a pipeline have sent; None: there are none.
        """
        size = micro.tokens.input_ids.shape[1]
        place = slice(0, size) if self._slices is None else self._slices.place(size)
        # The rest fills up the slices of a sequence-parallel group.
        self._num_valid = max(0, min(place.stop, micro.tokens.num_own) - place.start)
        self._sums, self._is_open = [] if earlier is None else [earlier], True

    def add(self, loss: Tensor, shares: dict[str, Tensor], micro: MicroBatch) -> Loss:
        """Add this micro-batch's share to a loss and its metrics; after its forward pass and before its backward."""
        if self._coefficient == 0:
            return loss, shares
        peers, num_tokens = micro.tokens.segments.peers, micro.tokens.num_tokens
        (sums,) = self.to_send()
        chosen_E, probabilities_E = sums[0].detach(), sums[1]
        for group in (self._slices, peers):
            if group is not None:
                chosen_E, probabilities_E = group.sum(chosen_E), group.sum(probabilities_E)
        num_rows = chosen_E.sum() / self._per_token
        found = balance_loss(chosen_E / num_rows, probabilities_E / num_rows)
        share = found * (num_tokens / self._num_tokens)
        return loss + self._coefficient * share, shares | {_METRIC: share.detach()}

    def to_send(self) -> tuple[Tensor, ...]:
        """Return the sums of all layers until here, [2, E], after the forward pass; empty if nothing is computed."""
        self._is_open = False
        if self.none is None:
            return ()
        return (torch.stack([self.none, *self._sums]).sum(dim=0),)

    def _observe(self, probabilities_TE: Tensor, chosen_TK: Tensor) -> None:
        """Sum a router's probabilities, float32, and its choices over the tokens."""
        of_experts = probabilities_TE[: self._num_valid].sum(dim=0)
        if not self._is_open:
            return
        with torch.no_grad():
            chosen = chosen_TK[: self._num_valid].flatten()
            num_chosen = torch.zeros_like(of_experts).scatter_add_(0, chosen, torch.ones_like(chosen).float())
        self._sums.append(torch.stack([num_chosen, of_experts]))
