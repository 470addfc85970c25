"""What a plan runs for a role, and what it found: the data between `roles`, `role_memory`, `traffic` and `seconds`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.model import LoadOptions

__all__ = ["Measured", "Traffic", "Work"]


@dataclass(frozen=True)
class Work:
    """One role's model and its fullest passes.

    kind: actor, critic, ref or reward_model. dims: of its ranks. sequences: of the fullest micro-batch of the whole
    batch, each of prompt_tokens and response_tokens. update_sequences: of the fullest one of a minibatch. num_passes:
    micro-batches of a minibatch. num_forward: micro-batches of the whole batch; only a pipeline's memory depends on it.
    training: None if nothing is trained. per_host: ranks of a host; None: all.
    """

    kind: str
    config: PretrainedConfig
    options: LoadOptions
    dims: ParallelDims
    sequences: int
    num_passes: int
    prompt_tokens: int
    response_tokens: int
    training: ActorSpec | CriticSpec | None = None
    update_sequences: int = 0
    num_forward: int = 1
    per_host: int | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes of a rank's collectives, by kind, with its own part: of a gather the result, of a reduction what is
    reduced, of an exchange or a message what arrives. from_other_hosts: see `network`.
    """

    received: Counter[str] = field(default_factory=Counter)
    from_other_hosts: Counter[str] = field(default_factory=Counter)

    def __or__(self, other: Traffic) -> Traffic:
        """Return the most of both, of each kind."""
        return Traffic(self.received | other.received, self.from_other_hosts | other.from_other_hosts)

    def __add__(self, other: Traffic) -> Traffic:
        """Return the sum of both."""
        return Traffic(self.received + other.received, self.from_other_hosts + other.from_other_hosts)

    def __sub__(self, other: Traffic) -> Traffic:
        """Return what remains without the other, of no kind less than nothing."""
        return Traffic(self.received - other.received, self.from_other_hosts - other.from_other_hosts)

    def __floordiv__(self, number: int) -> Traffic:
        """Return the share of one of `number` micro-batches."""
        return Traffic(*(Counter({kind: size // number for kind, size in each.items()}) for each in self._both))

    @property
    def _both(self) -> tuple[Counter[str], Counter[str]]:
        return self.received, self.from_other_hosts


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank, beside the parameters of the whole model. layer_parameters: that compute for a token.
    expert_layers: layers of the whole model that have experts. num_adapters, layer_adapters: of the parameters those of
    adapters, and those that compute for a token.

    forward, update: most live bytes in a pass without backward, and in an optimizer step. push: the same while weights
    are sent to the engines, without moments; 0 if the role sends none. changing: of the weights that are sent, what
    training changes; None: all. traffic, update_traffic: of one micro-batch of such a pass. batch_traffic,
    step_traffic: once in a pass over the batch, and once in an optimizer step, beside those: of a model that stays
    gathered, its weights and gradients; of a pipeline, the gradients of tied embeddings. push_traffic: while all
    weights are gathered for the engines. Of a pipeline, each number is the most of any rank.
    """

    num_parameters: int
    weights: int
    layer_parameters: float = 0.0
    expert_layers: int = 0
    gradients: int = 0
    optimizer: int = 0
    forward: int = 0
    update: int = 0
    push: int = 0
    changing: int | None = None
    traffic: Traffic = field(default_factory=Traffic)
    update_traffic: Traffic = field(default_factory=Traffic)
    batch_traffic: Traffic = field(default_factory=Traffic)
    step_traffic: Traffic = field(default_factory=Traffic)
    push_traffic: Traffic = field(default_factory=Traffic)
    num_adapters: int = 0
    layer_adapters: float = 0.0

    @property
    def num_sent(self) -> int:
        """Parameters of the model that the engines have: adapters are merged into it."""
        return self.num_parameters - self.num_adapters

    @property
    def peak(self) -> int:
        """Most live bytes in any of the role's phases."""
        return max(self.forward, self.update)

    @property
    def activations(self) -> int:
        """What the peak holds beside weights, gradients and optimizer: activations, gathered layers, logits."""
        return self.peak - self.weights - self.gradients - self.optimizer
