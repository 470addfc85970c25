"""`spec.data`: the prompts to train and to validate on."""

from enum import StrEnum

from pydantic import ConfigDict, Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules
from ppojob_api.v1alpha1.quantities import Path, RawObject, ShortText, Text


class SourceType(StrEnum):
    """Where prompts come from."""

    REASONING_GYM = "ReasoningGym"
    PARQUET = "Parquet"
    JSONL = "JSONL"
    HUGGING_FACE = "HuggingFace"


class OverlongPrompts(StrEnum):
    """What happens to a prompt that is longer than maxPromptLength."""

    FAIL = "Fail"
    FILTER = "Filter"
    TRUNCATE = "Truncate"


class ReasoningGymSource(ApiModel):
    """Problems made by a task generator of the package reasoning-gym; its own verifier scores them."""

    task: ShortText = Field(min_length=1)
    """Name of the task, such as chain_sum or products."""
    size: int = Field(default=4096, ge=1, le=10_000_000)
    """How many problems to make."""
    seed: int = Field(default=1, ge=0)
    """Seed of the generator: the same seed makes the same problems."""
    config: RawObject = Field(default_factory=dict)
    """Parameters of the task's own configuration, such as min_terms."""


class FilesSource(ApiModel):
    """Files with verl's columns: prompt, data_source, reward_model.ground_truth, extra_info."""

    paths: list[Path] = Field(min_length=1, max_length=256)
    """The files, as the container sees them."""
    prompt_column: ShortText = "prompt"
    """Column with the prompt: a string or a list of chat messages."""


class HuggingFaceSource(ApiModel):
    """A data set that `datasets.load_dataset` can read, with verl's columns."""

    path: Path
    """Name on the hub or a folder."""
    name: ShortText = ""
    """Configuration of the data set; empty: its default."""
    split: ShortText = "train"
    """Split to read."""
    prompt_column: ShortText = "prompt"
    """Column with the prompt: a string or a list of chat messages."""


_SOURCE_BLOCKS = {
    SourceType.REASONING_GYM: "reasoningGym",
    SourceType.PARQUET: "files",
    SourceType.JSONL: "files",
    SourceType.HUGGING_FACE: "huggingFace",
}


class DataSource(ApiModel):
    """One set of prompts; the block that belongs to the type must be there."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *(
                Rule(
                    rule=f"self.type != '{kind}' || has(self.{block})",
                    message=f"type {kind} needs the block {block}",
                    field_path=f".{block}",
                )
                for kind, block in _SOURCE_BLOCKS.items()
            )
        )
    )

    type: SourceType
    """Which kind of source this is."""
    reasoning_gym: ReasoningGymSource | None = None
    """For type ReasoningGym."""
    files: FilesSource | None = None
    """For types Parquet and JSONL."""
    hugging_face: HuggingFaceSource | None = None
    """For type HuggingFace."""
    system_prompt: Text = ""
    """System message put before each prompt; empty: none of ours."""

    @property
    def missing_block(self) -> str | None:
        """Name on the wire of the block that the type asks for and that is not there."""
        given = {"reasoningGym": self.reasoning_gym, "files": self.files, "huggingFace": self.hugging_face}
        block = _SOURCE_BLOCKS[self.type]
        return block if given[block] is None else None


class DataSpec(ApiModel):
    """The prompts, and how many go into a step."""

    train: DataSource
    """Prompts to train on."""
    validation: DataSource | None = None
    """Prompts to validate on; absent: no validation."""
    train_batch_size: int = Field(default=1024, ge=1, le=1_048_576)
    """Prompts a step (sequences = prompts x rollout.samplesPerPrompt)."""
    max_prompt_length: int = Field(default=512, ge=1, le=1_048_576)
    """Longest prompt, in tokens."""
    max_response_length: int = Field(default=512, ge=1, le=1_048_576)
    """Longest response, in tokens."""
    overlong_prompts: OverlongPrompts = OverlongPrompts.FAIL
    """What happens to a prompt longer than maxPromptLength."""
    shuffle: bool = True
    """Shuffle the training prompts each epoch, by trainer.seed."""
