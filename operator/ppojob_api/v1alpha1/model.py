"""`spec.model`: which model each role loads and how it is held in memory."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.quantities import Path, ShortText


class LoRA(ApiModel):
    """Low-rank adapters (Hu et al. 2021): a linear layer computes with W + alpha / rank * B A, and only A and B are
    trained, beside the critic's value head. The rollout engines and the exported model get the sum."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0, le=65_536)
    """Numerator of the factor before B A."""
    target_modules: Annotated[list[ShortText], Field(max_length=64)] = Field(default_factory=list)
    """Last parts of the names of the linear layers that get adapters, such as q_proj. Empty: all linear layers of the
    decoder layers."""


class FrozenOffload(ApiModel):
    """What lies in the host's pinned memory while the role does not compute; it comes back for each call. The numbers
    stay the same."""

    parameters: bool = False
    """The parameters."""


class Offload(FrozenOffload):
    """What lies in the host's pinned memory while the role does not compute, so that other roles have the GPU. It
    comes back for each call that needs it, so the peak of the role's own phases stays. The numbers stay the same."""

    optimizer: bool = False
    """AdamW's moments; only updates and checkpoints bring them back."""


class TrainedModel(ApiModel):
    """A model that is trained with FSDP2."""

    path: Path | None = None
    """Folder of a HuggingFace checkpoint, as the container sees it.
    Absent for the critic: the actor's weights with a new value head."""
    gradient_checkpointing: bool = True
    """Recompute each layer in the backward pass instead of keeping its activations."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the checkpoint."""
    compile: bool = False
    """Compile each layer with torch.compile. Without effect where tensorParallelSize is above 1: torch 2.13 cannot
    compile divided layers."""
    lora: LoRA | None = None
    """Train low-rank adapters only. Absent: all parameters."""
    offload: Offload = Offload()
    """What leaves the GPU between the role's phases."""
    activation_offload: bool = False
    """Keep the layers' inputs, which gradient checkpointing recomputes from, in the host's pinned memory until the
    backward pass. Needs gradientCheckpointing."""
    reshard_after_forward: bool | None = None
    """true: each layer's weights are gathered from the role's GPUs for its forward pass and again for its backward
    pass, and freed in between. false: once for a whole optimizer step, at whose end gradients are summed over the GPUs.
    It is faster, and takes memory on each GPU for the whole model in bfloat16 and for the gradients of what is trained
    in float32. Absent: false where the GPUs of the pool have that memory, without tensorParallelSize. The numbers stay
    the same up to rounding."""


class ActorModel(TrainedModel):
    """The policy."""

    path: Path
    """Folder of a HuggingFace causal language model with its tokenizer, as the container sees it."""


class FrozenModel(ApiModel):
    """A model that only computes."""

    path: Path | None = None
    """Folder of a HuggingFace checkpoint, as the container sees it. Absent for ref: the actor's initial weights; with
    model.actor.lora that is the actor itself with its adapters off, in the actor's pool."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the checkpoint."""
    compile: bool | None = None
    """Compile each layer with torch.compile. Absent: as model.actor.compile says."""
    offload: FrozenOffload = FrozenOffload()
    """What leaves the GPU between the role's phases."""
    reshard_after_forward: bool | None = None
    """true: each layer's weights are gathered for each forward pass. false: once for all passes over a batch, or
    over the part of one that streams. Absent: false where the GPUs of the pool have the memory, without
    actor.tensorParallelSize."""


class RewardInput(StrEnum):
    """What a reward model reads."""

    AUTO = "Auto"
    CHAT = "Chat"
    TEXT = "Text"
    RESPONSE = "Response"


class RewardModel(ApiModel):
    """A sequence-classification model that scores responses. It may have another vocabulary and chat template than
    the actor: the response is decoded by the actor's tokenizer and tokenized by the reward model's.
    """

    path: Path
    """Folder of a HuggingFace checkpoint for AutoModelForSequenceClassification with its tokenizer, as the container
    sees it."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the checkpoint."""
    label: int = Field(default=0, ge=0, le=65_535)
    """Number of the label whose logit is the score; 0 with the usual one label."""
    input: RewardInput = RewardInput.AUTO
    """What it reads. Chat: prompt and response in the reward model's chat template. Text: their contents, one below
    the other. Response: the response alone. Auto: Chat if there is a template, else Text."""
    max_length: int | None = Field(default=None, ge=1, le=16_777_216)
    """Longest input in tokens; longer ones lose their beginning. Absent: what the model can take."""
    max_tokens_per_gpu: int = Field(default=32_768, ge=1, le=16_777_216)
    """Tokens of one forward pass on one GPU, padding included."""


class ModelSpec(ApiModel):
    """Which model each role loads."""

    actor: ActorModel
    """The policy that is trained and that writes the responses."""
    critic: TrainedModel = TrainedModel()
    """The value model. Path absent: the actor's weights with a new value head."""
    ref: FrozenModel = FrozenModel()
    """The reference policy for the KL terms. Path absent: the actor's initial weights."""
    reward: RewardModel | None = None
    """The reward model, with reward.type Model or Both."""

    @property
    def reference_is_actor(self) -> bool:
        """Whether the reference is the actor with its adapters off, and no copy of it."""
        return self.actor.lora is not None and self.ref.path is None
