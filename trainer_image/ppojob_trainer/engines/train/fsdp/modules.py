"""A model as the engine calls it: a policy that returns log-probs, or a decoder with a value head.

Built by `model`. Each may be a pipeline stage (`stages`): one before the last returns its hidden states, for the next.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ppojob_trainer.engines.train.batch import PackedTokens
from ppojob_trainer.engines.train.fsdp.offload import activations_on_host
from ppojob_trainer.engines.train.fsdp.passes import Received
from ppojob_trainer.engines.train.fsdp.routing import replay_experts
from ppojob_trainer.engines.train.fsdp.stages import Stage, computing
from ppojob_trainer.engines.train.fsdp.tensor_parallel import local
from ppojob_trainer.maths.log_probs import linear_log_probs

__all__ = ["PolicyModule", "ValueModule", "is_sent"]


class PolicyModule(nn.Module):
    """A causal language model that returns the log-probs of given tokens, or a pipeline stage of one."""

    def __init__(self, language_model: PreTrainedModel, *, activation_offload: bool = False) -> None:
        """Take a whole model; `build_policy` cuts it to a stage."""
        super().__init__()
        self.language_model = language_model
        self.activation_offload = activation_offload
        self.stage: Stage | None = None
        self.num_outputs: int = self.output_layer.out_features
        """Number of logits."""

    @property
    def backbone(self) -> nn.Module:
        """The decoder without its output layer."""
        return self.language_model.get_submodule(self.language_model.base_model_prefix)

    @property
    def output_layer(self) -> nn.Linear:
        """The layer from hidden states to logits; its weight may be the embedding's."""
        layer = self.language_model.get_output_embeddings()  # type: ignore[no-untyped-call]
        assert isinstance(layer, nn.Linear), f"the output layer is {type(layer).__name__}"
        return layer

    def forward(self, tokens: PackedTokens, temperature: float, received: Received | None = None) -> tuple[Tensor, ...]:
        """Return log-probs and entropies of the N labels, float32 [N], at `temperature`.

        A stage before the last returns its hidden states; `received` is what a stage received.
        """
        with activations_on_host(is_enabled=self.activation_offload):
            hidden = _hidden(self.backbone, tokens, received, self.stage)
        if is_sent(received):
            return (_to_send(hidden, received),)
        # Under the same name: the hidden states of all tokens are freed before the logits take memory.
        hidden = hidden.index_select(0, tokens.rows)
        return linear_log_probs(hidden, local(self.output_layer.weight), tokens.labels, temperature)


class ValueModule(nn.Module):
    """A decoder with a value head, which computes in float32: values are compared by small differences.

    Of a pipeline, only the rank with the last stage has the head.
    """

    def __init__(
        self, language_model: PreTrainedModel, value_head: nn.Linear, *, activation_offload: bool = False
    ) -> None:
        """Take a whole decoder; `build_critic` cuts it to a stage."""
        super().__init__()
        self.language_model = language_model
        self.activation_offload = activation_offload
        self.stage: Stage | None = None
        self.value_head: nn.Linear | None = value_head

    @property
    def backbone(self) -> nn.Module:
        """The decoder."""
        return self.language_model

    @property
    def num_outputs(self) -> int:
        """0: the value head is too small to count."""
        return 0

    def forward(self, tokens: PackedTokens, received: Received | None = None) -> Tensor:
        """Return the N values, float32 [N]; of a stage before the last, its hidden states."""
        with activations_on_host(is_enabled=self.activation_offload):
            hidden = _hidden(self.backbone, tokens, received, self.stage)
        if is_sent(received):
            return _to_send(hidden, received)
        assert self.value_head is not None, "the rank with the last stage has the value head"
        # Under the same name: the hidden states of all tokens are freed.
        hidden = hidden.index_select(0, tokens.rows)
        values: Tensor = self.value_head(hidden.float())
        # FSDP adds hooks to a module's outputs, and warns if they are views.
        return values.squeeze(-1).clone()


def _hidden(backbone: nn.Module, tokens: PackedTokens, received: Received | None, stage: Stage | None) -> Tensor:
    """Return hidden states [T, D], of a pipeline those of one of the rank's stages."""
    inputs: dict[str, Tensor] = {"input_ids": tokens.input_ids}
    if received is not None and received.hidden is not None:
        inputs = {"inputs_embeds": received.hidden[: tokens.input_ids.shape[1]].unsqueeze(0)}
    replay_experts(backbone, tokens.experts)
    chosen: AbstractContextManager[None] = nullcontext()
    if received is not None and stage is not None and stage.peers.virtual > 1:
        chosen = computing(backbone, stage.peers, received.stage)
    with chosen:
        output = backbone(**inputs, position_ids=tokens.position_ids, use_cache=False, segments=tokens.segments)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _to_send(hidden: Tensor, received: Received | None) -> Tensor:
    """Pad hidden states to the width of the pass's messages."""
    assert received is not None, "a stage receives the width of its messages"
    return functional.pad(hidden, (0, 0, 0, received.width - hidden.shape[0]))


def is_sent(received: Received | None) -> bool:
    """Whether hidden states are sent to a later stage."""
    return received is not None and not received.is_last
