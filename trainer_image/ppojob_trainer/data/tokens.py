"""The token ids of all prompts of a source: computed once, in several processes, and cached.

    source ── rows in blocks ──▶ processes: chat template, tokenizer ──▶ blocks in their order ──▶ cache

The order of the prompts and their ids do not depend on the number of processes. `dataset` filters by length later, so
another maximum needs no new cache. Called by the data actor.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from ppojob_api.v1alpha1.data import DataSource
from ppojob_trainer.data.cache import NO_CACHE, TableCache
from ppojob_trainer.data.errors import DataError
from ppojob_trainer.data.records import PromptSource
from ppojob_trainer.data.sources import open_source
from ppojob_trainer.data.tokenize import PromptTokenizer, Tokenizer

logger = logging.getLogger(__name__)

_SCHEMA = pa.schema([("token_ids", pa.list_(pa.int32())), ("data_source", pa.string())])
_FORMAT = 1
"""Part of the key: raise it if the same prompts get other token ids."""
_BLOCK = 2048
"""Prompts that are tokenized at a time."""
_WORTH_PROCESSES = 50_000
"""Fewer prompts are tokenized here: to start processes takes longer."""
_LOG_EVERY_S = 15.0
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class TokenizedPrompts:
    """The token ids and the data source of each prompt, by the prompt's number in the source."""

    def __init__(self, table: pa.Table) -> None:
        self._token_ids = table.column("token_ids")
        self._data_sources = table.column("data_source")
        self.lengths: np.ndarray[Any, Any] = pc.list_value_length(self._token_ids).to_numpy()

    @classmethod
    def of(cls, source: PromptSource, tokenizer: PromptTokenizer) -> TokenizedPrompts:
        """Tokenize a source here, without a cache.

        Raises:
            DataError: a prompt cannot be used; names it.
        """
        blocks = (_tokenized(source, tokenizer, start) for start in range(0, len(source), _BLOCK))
        return cls(pa.Table.from_batches(blocks, _SCHEMA))

    def __len__(self) -> int:
        return len(self._token_ids)

    def token_ids(self, index: int) -> list[int]:
        """Return the token ids of prompt `index`, at full length."""
        ids: list[int] = self._token_ids[index].as_py()
        return ids

    def data_sources(self) -> set[str]:
        """Return the names of the data sets that the prompts are of."""
        return set(pc.unique(self._data_sources).to_pylist())


@dataclass(frozen=True)
class Preparation:
    """How the prompts of a source become token ids; processes receive it.

    model: folder of the model whose tokenizer `load_tokenizer` returns. workers: processes.
    """

    source: DataSource
    model: str
    load_tokenizer: Callable[[], Tokenizer]
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cache: TableCache = NO_CACHE
    workers: int = 1

    def opened(self) -> tuple[PromptSource, PromptTokenizer]:
        """Open the source and load the tokenizer.

        Raises:
            DataError: the source cannot be read, or the chat template's variables are wrong.
        """
        source = open_source(self.source, self.cache)
        system_prompt, kwargs = self.source.system_prompt, self.chat_template_kwargs
        return source, PromptTokenizer(self.load_tokenizer(), system_prompt, self.chat_template, kwargs)

    def tokenized(self, source: PromptSource, tokenizer: PromptTokenizer) -> TokenizedPrompts:
        """Return the token ids of all prompts, from the cache if they are there.

        Args:
            source, tokenizer: as `opened` returned them.

        Raises:
            DataError: a prompt cannot be used, or a process ended.
        """
        identity = {
            "tokens": _FORMAT,
            "source": source.identity(),
            "tokenizer": _tokenizer_identity(Path(self.model)),
            "versions": {name: version(name) for name in ("transformers", "tokenizers")},
            "template": [self.source.system_prompt, self.chat_template, dict(self.chat_template_kwargs)],
        }
        build = lambda: _with_progress(self._blocks(source, tokenizer), source)  # noqa: E731
        return TokenizedPrompts(self.cache.table(identity, source.name, _SCHEMA, build).rows)

    def _blocks(self, source: PromptSource, tokenizer: PromptTokenizer) -> Iterator[pa.RecordBatch]:
        starts = range(0, len(source), _BLOCK)
        if self.workers > 1 and len(source) >= _WORTH_PROCESSES and source.is_shared:
            yield from _in_processes(self, starts, min(self.workers, len(starts)))
        else:
            yield from (_tokenized(source, tokenizer, start) for start in starts)


def _tokenized(source: PromptSource, tokenizer: PromptTokenizer, start: int) -> pa.RecordBatch:
    indices = range(start, min(start + _BLOCK, len(source)))
    records = [source[index] for index in indices]
    messages = [
        tokenizer.messages(record, f"{source.name}, prompt {index}")
        for index, record in zip(indices, records, strict=True)
    ]
    names = [record.data_source for record in records]
    columns = [pa.array(tokenizer.token_ids(messages), pa.list_(pa.int32())), pa.array(names, pa.string())]
    return pa.record_batch(columns, schema=_SCHEMA)


def _with_progress(blocks: Iterable[pa.RecordBatch], source: PromptSource) -> Iterator[pa.RecordBatch]:
    start = logged = time.monotonic()
    total, done = len(source), 0
    for block in blocks:
        yield block
        done, now = done + len(block), time.monotonic()
        if now - logged >= _LOG_EVERY_S or (done == total and logged > start):
            logged = now
            left = (now - start) / done * (total - done)
            text = "%s: %d of %d prompts tokenized (%.0f %%), about %.0f s left"
            logger.info(text, source.name, done, total, 100 * done / total, left)


def _in_processes(preparation: Preparation, starts: range, workers: int) -> Iterator[pa.RecordBatch]:
    """Yield the blocks in order. Each process opens the source itself; its rows are memory-mapped by all."""
    # A fork of a Ray process would inherit its locks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (preparation,)) as pool:
        try:
            yield from pool.map(_block, starts)
        except BrokenProcessPool as error:
            raise DataError(
                "a process that tokenizes prompts ended, often because memory ran out: give the pods more memory, or "
                f"lower trainer.dataWorkers, which is {preparation.workers}"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


_opened: list[tuple[PromptSource, PromptTokenizer]] = []
"""In a process of `_in_processes`: what it works with."""


def _begin(preparation: Preparation) -> None:
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    _opened.append(preparation.opened())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "it runs in a process of its own"
    parent.join()
    # The pool's queues never close by themselves: each process holds both of their ends.
    os._exit(1)


def _block(start: int) -> pa.RecordBatch:
    return _tokenized(*_opened[0], start)


def _tokenizer_identity(folder: Path) -> dict[str, str]:
    """Return the digests of all files beside the weights: which of them a tokenizer reads depends on its class."""
    files = [path for path in folder.iterdir() if path.is_file() and path.suffix not in _WEIGHTS]
    visible = [path for path in files if not path.name.startswith(".")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(visible)}
