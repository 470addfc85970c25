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
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0, le=65_536)
    """Scale of the adapters: their product B A is multiplied by alpha / rank."""
    target_modules: Annotated[list[ShortText], Field(max_length=64)] = Field(default_factory=list)
    """Linear layers that get adapters, by the last part of their name in HuggingFace checkpoints, such as q_proj.
    Empty: all linear layers of the decoder layers, those of experts too. A name means the layers of all experts, of
    shared experts and of dense layers: gate_proj, up_proj and down_proj, in Mixtral w1, w3 and w2, in gpt-oss
    gate_up_proj and down_proj."""


class FrozenOffload(ApiModel):
    """What lies in the host's pinned memory while the role does not compute; it comes back for each call. The numbers
    stay the same."""

    parameters: bool = False
    """The parameters."""


class Offload(FrozenOffload):
    """What lies in the host's pinned memory while the role does not compute, so that other roles have the GPU. It
    comes back for each call that needs it, so the peak of the role's own phases stays. The numbers stay the same."""

    optimizer: bool = False
    """AdamW's moments; they return for updates only."""


class TrainedModel(ApiModel):
    """A model that is trained with FSDP2."""

    path: Path | None = None
    """Folder of a HuggingFace checkpoint in the container, or an address that is fetched into the storage:
    hf://organisation/name[@revision], s3://bucket/prefix or gs://bucket/prefix.
    Absent for the critic: the actor's weights with a new value head."""
    gradient_checkpointing: bool = True
    """Recompute each layer in the backward pass instead of keeping its activations."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the checkpoint."""
    compile: bool = False
    """Compile each layer with torch.compile. The default is false because the first start takes longer and needs more
    GPU memory. Recommended for long runs. In mixtures of experts with expertParallelSize or tensorParallelSize above 1,
    only the attention of layers with experts is compiled, not their routers and experts."""
    lora: LoRA | None = None
    """Train low-rank adapters only. Absent: all parameters."""
    offload: Offload = Offload()
    """What moves to host memory between the role's phases."""
    activation_offload: bool = False
    """Keep the layers' inputs in pinned host memory until the backward pass. Requires gradientCheckpointing, which
    recomputes from them."""
    reshard_after_forward: bool | None = None
    """true: gather each layer's weights from the role's GPUs for the forward pass and again for the backward pass, and
    free them in between. false: gather them once per optimizer step, and sum gradients over the GPUs at its end. false
    is faster, and needs memory on each GPU for the whole model in bfloat16 and for the trained parameters' gradients in
    float32; with pipelineParallelSize for one stage only, and with expertParallelSize only for the GPU's own experts.
    Absent: false if the pool's GPUs have that memory, and tensorParallelSize, pipelineParallelSize and
    expertParallelSize are 1. Results are the same up to rounding."""


class ActorModel(TrainedModel):
    """The policy."""

    path: Path
    """HuggingFace causal language model with its tokenizer: a folder in the container, or an address that is fetched
    into the storage: hf://organisation/name[@revision], s3://bucket/prefix or gs://bucket/prefix."""


class FrozenModel(ApiModel):
    """A model that only computes."""

    path: Path | None = None
    """Folder of a HuggingFace checkpoint in the container, or an address, as for the actor. Absent: the actor's initial
    weights; with model.actor.lora, the actor itself without its adapters, in the actor's pool."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the checkpoint."""
    compile: bool | None = None
    """Compile each layer with torch.compile. Absent: the value of model.actor.compile."""
    offload: FrozenOffload = FrozenOffload()
    """What moves to host memory between the role's phases."""
    reshard_after_forward: bool | None = None
    """true: gather each layer's weights for each forward pass. false: gather them once for all passes over a batch, or
    over a streamed part of one. Absent: false if the pool's GPUs have the memory, and tensorParallelSize,
    pipelineParallelSize and expertParallelSize of the actor are 1."""


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
    """HuggingFace checkpoint for AutoModelForSequenceClassification with its tokenizer: a folder in the container, or
    an address, as for the actor."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the checkpoint."""
    label: int = Field(default=0, ge=0, le=65_535)
    """Index of the label whose logit is the score; 0 for models with one label."""
    input: RewardInput = RewardInput.AUTO
    """Input of the model. Chat: prompt and response in the reward model's chat template. Text: their contents, one
    below the other. Response: only the response. Auto: Chat if the model has a template, else Text."""
    max_length: int | None = Field(default=None, ge=1, le=16_777_216)
    """Longest input, in tokens; longer ones are truncated on the left. Absent: the model's limit."""
    max_tokens_per_gpu: int = Field(default=32_768, ge=1, le=16_777_216)
    """Tokens per forward pass and GPU, including padding."""


class ModelSpec(ApiModel):
    """Which model each role loads."""

    actor: ActorModel
    """The policy that is trained and that generates the responses."""
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

    @property
    def reference_has_actors_weights(self) -> bool:
        """Whether the reference's weights are those with which the actor begins."""
        return self.ref.path in (None, self.actor.path)
