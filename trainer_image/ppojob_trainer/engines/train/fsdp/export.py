"""Exports the policy as a HuggingFace folder, the result of a run.

Called by the engine. The weights are gathered a layer at a time, and each rank writes its share of the files
(`export_files`): it holds at most about `SHARD_BYTES` and a layer, however large the model is. Rank 0 writes the rest
when all weights are written, the index last. Files and index have the names that `from_pretrained` and vLLM read. It
refuses a folder that is not empty.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.engines.errors import CheckpointUnwritableError
from ppojob_trainer.engines.train.fsdp.background_saves import first_line
from ppojob_trainer.engines.train.fsdp.checkpoint import refuse_existing
from ppojob_trainer.engines.train.fsdp.export_files import ExportFiles, plan_files
from ppojob_trainer.engines.train.fsdp.lora import ADAPTER_FOLDER, write_adapters
from ppojob_trainer.engines.train.fsdp.stages import Stage
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.exports.target import MANIFEST

T = TypeVar("T")

SHARD_BYTES: Final = 5 * 10**9
"""Size of a weight file in bytes, as in most folders on the HuggingFace hub."""

_LAYER: Final = re.compile(r".*?\blayers\.\d+\.")
# Everything else in the model's folder belongs to the tokenizer or to remote code, or is its card or licence.
_NOT_COPIED: Final = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "config.json"),
    # Of a model that was itself exported to a bucket.
    MANIFEST,
)


def export(
    folder: Path,
    language_model: PreTrainedModel,
    source: Path,
    parallel: ParallelMesh,
    lora: LoRA | None = None,
    stage: Stage | None = None,
) -> None:
    """Write a HuggingFace folder with bfloat16 weights, and the tokenizer of `source`. Collective; all ranks write.

    Adapters are merged into the weights. The subfolder `adapter` has them once more, in peft's format and float32.

    Raises:
        FileExistsError: the folder is not empty.
        CheckpointUnwritableError: the storage refused a write of some rank. The folder then has no index.
    """
    refuse_existing(folder, parallel)
    # On each host: a network file system may remember that there was no such folder.
    folder.mkdir(parents=True, exist_ok=True)
    weights = ShardedWeights(language_model, stage=stage)
    groups = [_PlannedGroup.of(language_model, group) for group in _groups(_empty(language_model, weights))]
    planned = {name: tensor for group in groups for name, tensor in group.written.items()}
    plan = plan_files(planned, parallel.world_size, SHARD_BYTES)
    failed = _write_weights(ExportFiles(folder, plan.of(parallel.rank)), language_model, weights, groups)
    is_first = parallel.rank == 0
    adapters = {} if lora is None else {name: tensor.cpu() for name, tensor in weights.adapters() if is_first}
    failure = parallel.first_text("" if failed is None else f"rank {parallel.rank}: {first_line(failed)}")
    if failure:
        raise CheckpointUnwritableError(
            f"the export {folder} cannot be written: {failure}. Check the storage's free space and permissions; "
            "earlier exports and checkpoints are complete"
        )
    if is_first:
        if lora is not None:
            write_adapters(folder / ADAPTER_FOLDER, adapters, lora, base=str(source))
        _complete(folder, language_model, source, plan.index)
    parallel.barrier()


@dataclass(frozen=True)
class _PlannedGroup:
    """The parameters of a decoder layer, by name, and the tensors of a checkpoint that they become, on meta."""

    parameters: Collection[str]
    written: Mapping[str, Tensor]

    @classmethod
    def of(cls, language_model: PreTrainedModel, group: dict[str, Tensor]) -> _PlannedGroup:
        return cls(group.keys(), _of_checkpoint(language_model, group))

    def needed_for(self, names: Collection[str]) -> frozenset[str]:
        """Return the parameters from which the written tensors with these names are made."""
        if self.written.keys() == set(self.parameters):
            return frozenset(self.parameters).intersection(names)
        # Parameters that are renamed, split or combined cannot be found by name.
        return frozenset() if self.written.keys().isdisjoint(names) else frozenset(self.parameters)


def _write_weights(
    files: ExportFiles, language_model: PreTrainedModel, weights: ShardedWeights, groups: Sequence[_PlannedGroup]
) -> Exception | None:
    """Gather all weights, and write this rank's files; return why it could not."""
    needed = frozenset[str]().union(*(group.needed_for(files.names) for group in groups))
    for values in _groups(_values(language_model, weights, needed)):
        kept = {name: value for name, value in values.items() if value is not None}
        for name, tensor in _of_checkpoint(language_model, kept).items():
            if name in files.names:
                files.add(name, tensor)
    return files.finish()


def _complete(folder: Path, language_model: PreTrainedModel, source: Path, index: Mapping[str, object] | None) -> None:
    """Write everything but the weights and the adapters. The index comes last: weights are found through it."""
    _copy_companions(source, folder)
    _write_configs(language_model, folder)
    if index is not None:
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _empty(language_model: PreTrainedModel, weights: ShardedWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and shapes of the tensors that are written."""
    for spec in weights.specs():
        yield spec.name, torch.empty(spec.shape, dtype=torch.bfloat16, device="meta")
    for name, buffer in _buffers(language_model):
        yield name, torch.empty(buffer.shape, dtype=torch.bfloat16, device="meta")


def _values(
    language_model: PreTrainedModel, weights: ShardedWeights, kept: Collection[str]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the same tensors with their values, in host memory; of those that are not kept None."""
    for spec, tensor in zip(weights.specs(), weights.gather(), strict=True):
        # A gathered tensor is freed with its layer.
        yield spec.name, tensor.to("cpu", copy=True) if spec.name in kept else None
    for name, buffer in _buffers(language_model):
        yield name, buffer.to("cpu", torch.bfloat16, copy=True) if name in kept else None


def _buffers(language_model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    stored = set(language_model.state_dict())
    return [(name, buffer) for name, buffer in language_model.named_buffers() if name in stored]


def _groups(tensors: Iterable[tuple[str, T]]) -> Iterator[dict[str, T]]:
    """Yield the tensors of a decoder layer together, because a checkpoint's tensors may combine or split them.

    For example, transformers fuses the experts of a layer.
    """

    def layer(named: tuple[str, T]) -> str:
        found = _LAYER.match(named[0])
        return found[0] if found else named[0]

    for _, group in groupby(tensors, layer):
        yield dict(group)


def _of_checkpoint(language_model: PreTrainedModel, group: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names of the family's checkpoints; fused experts are split again."""
    reverted: dict[str, Tensor] = revert_weight_conversion(language_model, group)
    return reverted


def _write_configs(language_model: PreTrainedModel, folder: Path) -> None:
    """Write the configurations, because the loaded one says float32 and no cache."""
    config = copy.deepcopy(language_model.config)
    config.dtype, config.use_cache = torch.bfloat16, True
    config.architectures = [type(language_model).__name__]
    if language_model.is_remote_code():
        custom_object_save(language_model, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)
    if language_model.can_generate():
        language_model.generation_config.save_pretrained(folder)


def _copy_companions(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in _NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
