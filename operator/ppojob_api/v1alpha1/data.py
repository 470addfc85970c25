"""`spec.data`: the prompts to train and to validate on."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules, wire_name
from ppojob_api.v1alpha1.quantities import DNSLabel, Path, RawObject, ShortText, Text

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
    hf://datasets/organisation/name[@revision]/path/file, s3://bucket/key or gs://bucket/key. The file extension decides
    the format, and all files must have the same format: .parquet, or .jsonl and .json for JSON Lines."""

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


def _exactly_one_of(kinds: tuple[str, ...]) -> Rule:
    given = ", ".join(f"has(self.{kind})" for kind in kinds)
    return Rule(rule=f"[{given}].exists_one(given, given)", message=exactly_one_of(kinds))


def exactly_one_of(kinds: tuple[str, ...]) -> str:
    """Return the remedy for a source with no block or with several."""
    return f"set exactly one of {', '.join(kinds[:-1])} and {kinds[-1]}"


_KINDS = ("reasoningGym", "files", "huggingFace")
_KINDS_TO_TRAIN_ON = (*_KINDS, "mixture")


class DataSource(ApiModel):
    """One set of prompts: exactly one of reasoningGym, files and huggingFace."""

    model_config = ConfigDict(json_schema_extra=rules(_exactly_one_of(_KINDS)))

    KINDS: ClassVar[tuple[str, ...]] = _KINDS
    """The blocks of which exactly one is set, by their names on the wire."""

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
        """The blocks that are set, of `KINDS`."""
        set_fields = {wire_name(name) for name in type(self).model_fields if getattr(self, name) is not None}
        return [kind for kind in self.KINDS if kind in set_fields]


class MixedSource(DataSource):
    """One source of a mixture, and its share of the prompts."""

    name: DNSLabel
    """Name of the source, in metrics, samples and errors."""
    weight: float = Field(default=1.0, gt=0, le=1_000_000)
    """How many of the prompts come from this source, relative to the weights of the others."""


class TrainingSource(DataSource):
    """Prompts to train on: one source, or a mixture of several."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            _exactly_one_of(_KINDS_TO_TRAIN_ON),
            Rule(
                rule="!has(self.mixture) || !has(self.systemPrompt) || self.systemPrompt == ''",
                message="each source of a mixture has its own systemPrompt: move it there",
                field_path=".systemPrompt",
            ),
        )
    )

    KINDS: ClassVar[tuple[str, ...]] = _KINDS_TO_TRAIN_ON

    mixture: list[MixedSource] | None = Field(
        default=None,
        min_length=2,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Several sources instead of one. Each prompt comes from one of them, by weight; a source that is used up starts
    again. All sources together may name at most 256 files."""


class DataSpec(ApiModel):
    """The prompts, and how many go into a step."""

    train: TrainingSource
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
    """Shuffle the training prompts each epoch, by trainer.seed; in a mixture, each source by itself."""

    @property
    def shares(self) -> dict[str, float]:
        """The share of each source of a mixture, by name; empty without one."""
        mixture = self.train.mixture or []
        total = sum(source.weight for source in mixture)
        return {source.name: source.weight / total for source in mixture}

    def sources(self) -> Iterator[tuple[str, DataSource]]:
        """Yield each set of prompts with its field below `spec`; of a mixture, each source."""
        if self.train.mixture is None:
            yield "data.train", self.train
        for index, source in enumerate(self.train.mixture or ()):
            yield f"data.train.mixture[{index}]", source
        if self.validation is not None:
            yield "data.validation", self.validation
