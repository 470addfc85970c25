"""Which rank writes which files of an export, and how a rank writes its own.

Called by `export`. All ranks compute the same plan from names, shapes and the number of ranks, so nothing is exchanged.
Names and contents of the files depend on the model alone: any number of ranks writes the same bytes.

    gathered, a layer at a time    0  1  2  3  4  5  6  7  8 ...      on every rank
    rank 0                         file 1     ▶ written in a thread
    rank 1                                 file 2     ▶ written in a thread
    rank 2                                         file 3     ▶ ...

A rank copies to the host only what belongs to its files. It holds one file at a time: it takes nothing of its next file
before the last one is written. A rank whose storage fails keeps gathering with the others and reports it at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ppojob_trainer.checkpoints import durable

__all__ = ["ExportFiles", "ExportPlan", "PlannedFile", "plan_files"]

_NAMES: Final = "model{suffix}.safetensors"


@dataclass(frozen=True)
class PlannedFile:
    """A file of weights: its name, the tensors that it has, and the rank that writes it."""

    name: str
    tensors: frozenset[str]
    writer: int


@dataclass(frozen=True)
class ExportPlan:
    """All files of weights. index: content of the file that lists them; None for a single file, which needs none."""

    files: Sequence[PlannedFile]
    index: Mapping[str, object] | None

    def of(self, rank: int) -> list[PlannedFile]:
        """Return the files that a rank writes."""
        return [file for file in self.files if file.writer == rank]


def plan_files(tensors: Mapping[str, Tensor], num_ranks: int, max_bytes: int) -> ExportPlan:
    """Divide the tensors into files, and the files among the ranks.

    Args:
        tensors: names, shapes and dtypes of all tensors, in the order in which they are gathered; on the meta device.
        max_bytes: of a file; a larger tensor gets a separate file.
    """
    split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=_NAMES, max_shard_size=max_bytes)
    count = len(split.filename_to_tensors)
    files = [
        PlannedFile(name, frozenset(named), _writer(number, count, num_ranks))
        for number, (name, named) in enumerate(split.filename_to_tensors.items())
    ]
    if not split.is_sharded:
        return ExportPlan(files, None)
    metadata = {"total_parameters": sum(tensor.numel() for tensor in tensors.values()), **split.metadata}
    return ExportPlan(files, {"metadata": metadata, "weight_map": split.tensor_to_filename})


def _writer(number: int, num_files: int, num_ranks: int) -> int:
    """Return the rank that writes a file.

    Ranks of a host are consecutive. So where there are fewer files than ranks, the writers are spread over the hosts,
    each of which has its own network to the storage, and memory for the files of its ranks.
    """
    return number * num_ranks // num_files if num_files < num_ranks else number % num_ranks


class ExportFiles:
    """The files of one rank: takes their tensors in any order, and writes each file when it has all of its tensors."""

    def __init__(self, folder: Path, files: Sequence[PlannedFile]) -> None:
        self._folder = folder
        self._file_of = {name: file for file in files for name in file.tensors}
        self._held: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        self._writing = ThreadPoolExecutor(1, "export")
        self._running: Future[None] | None = None
        self._failure: OSError | SafetensorError | None = None

    @property
    def names(self) -> Collection[str]:
        """The tensors of this rank's files; none any more after a failure."""
        return () if self._failure is not None else self._file_of.keys()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor of one of these files, on the host; it must not change afterwards."""
        file = self._file_of[name]
        if file.name not in self._held:
            # A file that is being written still takes memory.
            self._wait()
        if self._failure is not None:
            return
        held = self._held[file.name]
        held[name] = tensor.contiguous()
        if len(held) == len(file.tensors):
            self._wait()
            self._running = self._writing.submit(_write, self._folder / file.name, self._held.pop(file.name))

    def finish(self) -> OSError | SafetensorError | None:
        """Wait until all files are written; return the first failure of the storage."""
        self._wait()
        self._writing.shutdown()
        assert self._failure is not None or not self._held, f"{sorted(self._held)} are not complete"
        return self._failure

    def _wait(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        try:
            running.result()
        except (OSError, SafetensorError) as error:
            self._failure = self._failure or error
            self._held.clear()


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file, and wait until the storage has it: another host renames the folder."""
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors writes files with mode 0600, but another user may serve the model.
    path.chmod(0o644)
    durable.sync(path)
