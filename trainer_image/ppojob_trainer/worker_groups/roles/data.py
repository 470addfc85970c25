"""The data: one CPU process that reads the prompts and returns those of each step.

The rows stay in its node's object store; the controller gets references. It keeps the position after each recent step,
because with overlapping steps the next steps' prompts are read before this step's checkpoint is written. It also writes
and reads the responses that a checkpoint has, and writes samples of the responses if only a model scores.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ppojob_api.v1alpha1.constants import CACHE_FOLDER
from ppojob_api.v1alpha1.data import DataSource
from ppojob_api.v1alpha1.model import ActorModel, RewardModel
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.data import Preparation, PromptDataset, PromptLoader, TableCache, WeightedDataset
from ppojob_trainer.engines.errors import ModelNotFoundError
from ppojob_trainer.protocol import ROLLOUT_COLUMNS, DataProto, Keys, Meta
from ppojob_trainer.rewards.batch import Decoder
from ppojob_trainer.worker_groups.dispatch import Dispatch, Metrics, register
from ppojob_trainer.worker_groups.errors import NotRenewableError
from ppojob_trainer.worker_groups.samples import READ_BY_SAMPLES, SampleKeeper
from ppojob_trainer.worker_groups.stored_rows import StoredRows, store_rows
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

__all__ = ["DataGroup", "DataWorker", "LoadedData", "PromptsOfStep", "load_tokenizer", "with_samples"]

_KEPT_POSITIONS = 8


def load_tokenizer(model: ActorModel | RewardModel) -> Any:
    """Return the tokenizer in a model's folder.

    Raises:
        ModelNotFoundError: there is none.
    """
    from transformers import AutoTokenizer

    from ppojob_trainer.engines.train.model_fit import read_config

    read_config(model.path, trust_remote_code=model.trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"model path {model.path} holds no tokenizer that can be read: {error}") from error


def cache_of(spec: PPOJobSpec) -> TableCache:
    """Return the cache of prepared data in the job's storage; without a storage, tables stay in memory."""
    storage = Path(spec.storage.mount_path)
    if not storage.is_dir():
        return TableCache()
    return TableCache(storage / CACHE_FOLDER / "data", f"a job on {socket.gethostname()}")


def with_samples(prompts: DataProto, samples: int) -> DataProto:
    """Repeat each prompt for its samples, in consecutive rows, and number the samples."""
    repeated = prompts[torch.arange(len(prompts)).repeat_interleave(samples)]
    return repeated.with_fields(non_tensors={Keys.SAMPLE_INDEX: [row % samples for row in range(len(repeated))]})


@dataclass(frozen=True)
class Prompt:
    """See `controller.ports.Sample`: one row of prompts. prompt: its source in a mixture, and its row there."""

    prompt: tuple[str, int]
    num_tokens: int


@dataclass(frozen=True)
class ReadPrompts:
    """Prompts of a step or of the validation, each repeated for its samples: references to them, and what they are.

    prompts: without the repetitions.
    """

    rows: StoredRows
    prompts: tuple[Prompt, ...]
    num_samples: int
    epoch: int = 0

    @classmethod
    def of(cls, batch: DataProto, num_samples: int, epoch: int = 0) -> ReadPrompts:
        """Store a batch of prompts."""
        rows = zip(batch.array(Keys.SOURCE).tolist(), batch.array(Keys.INDEX).tolist(), strict=True)
        tokens = batch.ragged(Keys.PROMPT_IDS).to_lists()
        prompts = tuple(Prompt(row, len(token_ids)) for row, token_ids in zip(rows, tokens, strict=True))
        return cls(store_rows(with_samples(batch, num_samples)), prompts, num_samples, epoch)


@dataclass(frozen=True)
class LoadedData:
    """Facts about the data.

    sources: the names of all data sets (data_source), sorted.
    steps_per_epoch: whole batches in an epoch of the training prompts, see `PromptLoader`.
    """

    sources: list[str]
    steps_per_epoch: int


class DataWorker:
    """Reads the data."""

    def __init__(self, context: WorkerContext, spec: PPOJobSpec) -> None:
        self.spec = spec
        self._loader: PromptLoader | None = None
        self._validation: ReadPrompts | None = None
        self._positions: dict[int, dict[str, Any]] = {}
        # The latest step, and the position before its prompts.
        self._start: tuple[int, dict[str, Any]] | None = None
        self._loaded: LoadedData | None = None
        self._samples = SampleKeeper(context, spec)
        self._decoder: Decoder | None = None

    def renew(self) -> None:
        """See `Renewable`: `restore` sets the position."""
        if self._loaded is None:
            raise NotRenewableError("the data was not opened yet")
        self._start, self._positions = None, {}
        self._samples.renew()

    @property
    def loader(self) -> PromptLoader:
        """The training prompts."""
        assert self._loader is not None, "load() comes first"
        return self._loader

    @register(dispatch=Dispatch.RANK_ZERO)
    def load(self) -> LoadedData:
        """Open the sources. Once.

        Raises:
            DataError: the data cannot be read, or a prompt cannot be used.
            ModelNotFoundError: no tokenizer in the actor's folder.
        """
        if self._loaded is not None:
            return self._loaded
        data = self.spec.data
        given = data.train.mixture
        if given is None:
            train = [WeightedDataset(self._dataset(data.train))]
        else:
            train = [WeightedDataset(self._dataset(source), source.name, source.weight) for source in given]
        self._loader = PromptLoader(train, data.train_batch_size, self.spec.trainer.seed, data.shuffle)
        names = {name for source in train for name in source.dataset.data_sources()}
        if data.validation is not None:
            dataset = self._dataset(data.validation)
            prompts = dataset.batch(range(len(dataset)))
            self._validation = ReadPrompts.of(prompts, self.spec.rollout.validation.samples_per_prompt)
            names |= dataset.data_sources()
        self._decoder = load_tokenizer(self.spec.model.actor)
        self._loaded = LoadedData(sorted(names), self._loader.steps_per_epoch)
        return self._loaded

    @register(dispatch=Dispatch.RANK_ZERO)
    def next_batch(self, step: int, count: int | None) -> ReadPrompts:
        """Return prompts for a step; see `PromptLoader.next_batch`."""
        if self._start is None or self._start[0] != step:
            self._start = step, self.loader.state_dict()
        batch = self.loader.next_batch(count)
        # No entry of the rows: with dynamic sampling a batch may have prompts of two epochs.
        epoch: int = batch.meta_info.pop(Meta.EPOCH)
        self._positions[step] = self.loader.state_dict()
        self._positions.pop(step - _KEPT_POSITIONS, None)
        return ReadPrompts.of(batch, self.spec.rollout.samples_per_prompt, epoch)

    @register(dispatch=Dispatch.RANK_ZERO)
    def give_back(self, step: int, used: int) -> None:
        """Go back to the position after the first `used` prompts of `step`, the latest one."""
        assert self._start is not None, "prompts come before they are given back"
        assert self._start[0] == step, "a later step has read prompts"
        self.loader.load_state_dict(self._start[1])
        self.loader.skip(used)
        self._positions[step] = self.loader.state_dict()

    @register(dispatch=Dispatch.RANK_ZERO)
    def validation_batch(self) -> ReadPrompts:
        """Return all validation prompts."""
        assert self._validation is not None, "the spec has no validation data"
        return self._validation

    @register(dispatch=Dispatch.RANK_ZERO)
    def position(self, step: int) -> dict[str, Any]:
        """Return the position after the prompts of `step`."""
        return self._positions[step]

    @register(dispatch=Dispatch.RANK_ZERO)
    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Resume after `step`.

        Raises:
            DataError: the position belongs to other data.
        """
        self.loader.load_state_dict(state)
        self._start = None
        self._positions[step] = self.loader.state_dict()

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO, reads=ROLLOUT_COLUMNS)
    def keep(self, batch: DataProto) -> DataProto:
        """Return a batch of other processes, which is then stored by this one."""
        return batch

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC, reads=READ_BY_SAMPLES)
    def write_samples(self, batch: DataProto) -> Metrics:
        """Write these rows of a scored batch, or as many as the step may still have, into `samples.jsonl`."""
        assert self._decoder is not None, "load() comes first"
        self._samples.keep(batch, self._decoder)
        return {}

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC, reads=ROLLOUT_COLUMNS)
    def save_rows(self, batch: DataProto, location: str) -> Metrics:
        """Write the rollout's columns of a batch into a checkpoint.

        Raises:
            CheckpointUnwritableError, BucketFailedError: see `engines.saved_rows`.
        """
        from ppojob_trainer.engines.saved_rows import save_rows

        save_rows(location, {name: batch.ragged(name) for name in batch.columns})
        return {}

    @register(dispatch=Dispatch.RANK_ZERO)
    def saved_rows(self, location: str) -> StoredRows:
        """Return the batch that `save_rows` wrote.

        Raises:
            CheckpointUnreadableError, BucketFailedError: see `engines.saved_rows`.
        """
        from ppojob_trainer.engines.saved_rows import load_rows

        return store_rows(DataProto.from_dict(load_rows(location)))

    def _dataset(self, given: DataSource) -> PromptDataset:
        spec, data, model = self.spec, self.spec.data, self.spec.model.actor
        preparation = Preparation(
            given,
            model.path,
            partial(load_tokenizer, model),
            data.chat_template,
            data.chat_template_kwargs,
            cache_of(spec),
            spec.trainer.data_workers,
        )
        source, tokenizer = preparation.opened()
        tokenized = preparation.tokenized(source, tokenizer)
        return PromptDataset(source, tokenizer, tokenized, data.max_prompt_length, data.overlong_prompts.value)


@dataclass(frozen=True)
class PromptsOfStep:
    """See `controller.ports.Prompts`."""

    batch: Table
    samples: Sequence[Prompt]
    epoch: int

    @classmethod
    def of(cls, read: ReadPrompts) -> PromptsOfStep:
        """Take over what the data's process returned."""
        samples = [prompt for prompt in read.prompts for _ in range(read.num_samples)]
        return cls(Table.of_stored(read.rows), samples, read.epoch)


class DataGroup:
    """The data as the controller calls it."""

    def __init__(self, group: WorkerGroup[DataWorker]) -> None:
        self.group = group

    async def prompts(self, step: int, count: int | None = None) -> PromptsOfStep:
        """See `DataPort`."""
        return PromptsOfStep.of(await self.group.call(DataWorker.next_batch, step, count))

    async def give_back(self, step: int, used: int) -> None:
        """See `DataPort`."""
        await self.group.call(DataWorker.give_back, step, used)

    async def validation_prompts(self) -> PromptsOfStep:
        """See `DataPort`."""
        return PromptsOfStep.of(await self.group.call(DataWorker.validation_batch))

    async def keep(self, batch: Table) -> Table:
        """See `DataPort`."""
        return await self.group.call(DataWorker.keep, batch)

    async def write_samples(self, batch: Table) -> None:
        """Write these rows of a scored batch into `samples.jsonl`."""
        await self.group.call(DataWorker.write_samples, batch)

    async def state(self, step: int) -> dict[str, Any]:
        """See `DataPort`."""
        return await self.group.call(DataWorker.position, step)

    async def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """See `DataPort`."""
        await self.group.call(DataWorker.restore, step, dict(state))

    async def save_rows(self, batch: Table, location: str) -> None:
        """Write the rollout's columns of a batch into a checkpoint, at a new file or key."""
        await self.group.call(DataWorker.save_rows, batch, location)

    async def saved_rows(self, location: str) -> Table:
        """Return the batch that `save_rows` wrote."""
        return Table.of_stored(await self.group.call(DataWorker.saved_rows, location))
