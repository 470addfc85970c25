"""Where prompts come from, one kind a file; `open_source` picks the kind that the PPOJob gives.

`check_columns` reads one row of each file, before the trainer starts.
"""

from __future__ import annotations

from ppojob_api.v1alpha1.data import DataSource
from ppojob_trainer.data.cache import NO_CACHE, TableCache
from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.records import PromptSource


def open_source(source: DataSource, cache: TableCache = NO_CACHE) -> PromptSource:
    """Open `data.train` or `data.validation` of a PPOJob.

    Args:
        cache: where rows are kept that cannot be read in place.

    Raises:
        DataError: no source is given, or it cannot be read; names the path or task.
    """
    # Each kind is imported when it is asked for: `datasets` and `reasoning_gym` take seconds.
    if source.reasoning_gym is not None:
        from ppojob_trainer.data.sources.reasoning_gym import ReasoningGymPrompts

        gym = source.reasoning_gym
        return ReasoningGymPrompts(gym.task, gym.size, gym.seed, gym.config)
    if source.files is not None:
        from ppojob_trainer.data.sources.parquet_jsonl import read_jsonl, read_parquet

        if source.files.are_parquet:
            return read_parquet(source.files.paths, source.files, cache)
        return read_jsonl(source.files.paths, source.files)
    if source.hugging_face is not None:
        from ppojob_trainer.data.sources.hugging_face import load_hugging_face

        hub = source.hugging_face
        return load_hugging_face(hub.path, hub.name, hub.split, hub)
    raise DataError("the data has no source: set exactly one of reasoningGym, files and huggingFace")


def check_columns(source: DataSource) -> None:
    """Read the first row of each file of a source, or of its split.

    Raises:
        DataError: a file cannot be read, or a column is missing; names the columns that are there.
    """
    if source.files is not None:
        from ppojob_trainer.data.sources.parquet_jsonl import check_jsonl, check_parquet

        check = check_parquet if source.files.are_parquet else check_jsonl
        for path in source.files.paths:
            check(path, source.files)
    if source.hugging_face is not None:
        from ppojob_trainer.data.sources.hugging_face import check_hugging_face

        hub = source.hugging_face
        check_hugging_face(hub.path, hub.name, hub.split, hub)
