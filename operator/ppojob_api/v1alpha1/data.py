"""`spec.data`: the prompts to train and to validate on."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules
from ppojob_api.v1alpha1.quantities import Path, RawObject, ShortText, Text

ChatTemplate = Annotated[str, Field(min_length=1, max_length=65_536)]


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
    """Number of problems to generate."""
    seed: int = Field(default=1, ge=0, le=2**31 - 1)
    """Seed of the generator; the same seed gives the same problems."""
    config: RawObject = Field(default_factory=dict)
    """Parameters of the task's own configuration, such as min_terms."""


class Columns(ApiModel):
    """Which columns of a row are read. The defaults are verl's columns: prompt, data_source,
    reward_model.ground_truth, extra_info."""

    prompt_column: ShortText = Field(default="prompt", min_length=1)
    """Column with the prompt: a string or a list of chat messages."""
    ground_truth_column: ShortText | None = Field(default=None, min_length=1)
    """Column with the ground truth for the reward function, such as answer in GSM8K. Absent: ground_truth in the column
    reward_model, if there is one."""
    data_source: ShortText | None = Field(default=None, min_length=1)
    """Name of the data, for the reward function and for validation metrics. Absent: the column data_source, else the
    name of the file or data set."""


PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".json")
"""Endings of files by their format."""


def _all_paths_end_with(endings: tuple[str, ...]) -> str:
    return f"self.paths.all(p, {' || '.join(f'p.endsWith({ending!r})' for ending in endings)})"


class FilesSource(Columns):
    """Parquet or JSON Lines files."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                rule=f"{_all_paths_end_with(PARQUET)} || {_all_paths_end_with(JSON_LINES)}",
                message="all paths must end with .parquet, or all with .jsonl or .json: the ending is the format",
                field_path=".paths",
            )
        )
    )

    paths: list[Path] = Field(min_length=1, max_length=256)
    """The files: absolute paths in the container, or addresses that are fetched into the storage:
    hf://datasets/organisation/name[@revision]/path/file, s3://bucket/key or gs://bucket/key. The ending is the format,
    the same for all: .parquet, or .jsonl and .json for JSON Lines."""

    @property
    def are_parquet(self) -> bool:
        """Whether the files of a checked spec are Parquet; otherwise they are JSON Lines."""
        return self.paths[0].endswith(PARQUET)


class HuggingFaceSource(Columns):
    """A data set that `datasets.load_dataset` can read."""

    path: Path
    """Folder in the container, or an address that is fetched into the storage: hf://organisation/name[@revision],
    s3://bucket/prefix or gs://bucket/prefix."""
    name: ShortText = ""
    """Configuration of the data set; empty: its default."""
    split: ShortText = "train"
    """Split to read."""


class DataSource(ApiModel):
    """One set of prompts: exactly one of reasoningGym, files and huggingFace."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                rule="[has(self.reasoningGym), has(self.files), has(self.huggingFace)].exists_one(given, given)",
                message="set exactly one of reasoningGym, files and huggingFace",
            )
        )
    )

    reasoning_gym: ReasoningGymSource | None = None
    """Problems of a task generator."""
    files: FilesSource | None = None
    """Parquet or JSON Lines files."""
    hugging_face: HuggingFaceSource | None = None
    """A data set of the hub, or a folder of one."""
    system_prompt: Text = ""
    """System message before each prompt; empty: none is added."""

    @property
    def given(self) -> list[str]:
        """The kinds of source that are given, by their names on the wire."""
        kinds = {"reasoningGym": self.reasoning_gym, "files": self.files, "huggingFace": self.hugging_face}
        return [name for name, kind in kinds.items() if kind is not None]


class DataSpec(ApiModel):
    """The prompts, and how many go into a step."""

    train: DataSource
    """Prompts to train on."""
    validation: DataSource | None = None
    """Prompts to validate on; absent: no validation."""
    train_batch_size: int = Field(default=1024, ge=1, le=1_048_576)
    """Prompts per step (sequences = prompts x rollout.samplesPerPrompt)."""
    max_prompt_length: int = Field(default=512, ge=1, le=1_048_576)
    """Longest prompt, in tokens."""
    max_response_length: int = Field(default=512, ge=1, le=1_048_576)
    """Longest response, in tokens."""
    overlong_prompts: OverlongPrompts = OverlongPrompts.FAIL
    """What happens to a prompt longer than maxPromptLength. Fail: the job fails. Filter: the prompt is left out.
    Truncate: the prompt is truncated on the left."""
    chat_template: ChatTemplate | None = None
    """Chat template (Jinja) for the prompts. Absent: the one of the actor's tokenizer."""
    chat_template_kwargs: RawObject = Field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking: false for Qwen3."""
    shuffle: bool = True
    """Shuffle the training prompts each epoch, by trainer.seed."""
