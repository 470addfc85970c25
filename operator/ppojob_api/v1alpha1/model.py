"""`spec.model`: which model each role loads and how it is held in memory."""

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.quantities import Path


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
    """Compile each layer with torch.compile."""


class ActorModel(TrainedModel):
    """The policy."""

    path: Path
    """Folder of a HuggingFace causal language model with its tokenizer, as the container sees it."""


class FrozenModel(ApiModel):
    """A model that only computes."""

    path: Path | None = None
    """Folder of a HuggingFace checkpoint, as the container sees it. Absent for ref: the actor's initial weights."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the checkpoint."""


class ModelSpec(ApiModel):
    """Which model each role loads."""

    actor: ActorModel
    """The policy that is trained and that writes the responses."""
    critic: TrainedModel = TrainedModel()
    """The value model. Path absent: the actor's weights with a new value head."""
    ref: FrozenModel = FrozenModel()
    """The reference policy for the KL terms. Path absent: the actor's initial weights."""
