"""Exports the policy as a HuggingFace folder, the result of a run.

Called by the engine. The weights are gathered a layer at a time, and rank 0 writes a file when it has all of its
tensors: it holds at most about `SHARD_BYTES`, however large the model is. Files and index have the names that
`from_pretrained` and vLLM read. It refuses a folder that is not empty.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Final, TypeVar

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.engines.train.fsdp.checkpoint import refuse_existing
from ppojob_trainer.engines.train.fsdp.lora import ADAPTER_FOLDER, write_adapters
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.exports.target import MANIFEST

T = TypeVar("T")

SHARD_BYTES: Final = 5 * 10**9
"""Size of a weight file in bytes, as in most folders on the HuggingFace hub."""

_FILES: Final = "model{suffix}.safetensors"
_LAYER: Final = re.compile(r".*?\blayers\.\d+\.")
# Everything else in the model's folder belongs to the tokenizer or to remote code, or is its card or licence.
_NOT_COPIED: Final = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "config.json"),
    # Of a model that was itself exported to a bucket.
    MANIFEST,
)


def export(
    folder: Path, language_model: PreTrainedModel, source: Path, parallel: ParallelMesh, lora: LoRA | None = None
) -> None:
    """Write a HuggingFace folder with bfloat16 weights, and the tokenizer of `source`. Collective; rank 0 writes.

    Adapters are merged into the weights. The subfolder `adapter` has them once more, in peft's format and float32.

    Raises:
        FileExistsError: the folder is not empty.
    """
    refuse_existing(folder, parallel)
    is_writer = parallel.rank == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_companions(source, folder)
        _write_configs(language_model, folder)
    weights = ShardedWeights(language_model)
    _write_weights(folder if is_writer else None, language_model, weights)
    if lora is not None:
        adapters = {name: tensor.cpu() for name, tensor in weights.adapters() if is_writer}
        if is_writer:
            write_adapters(folder / ADAPTER_FOLDER, adapters, lora, base=str(source))
    if is_writer:
        for file in folder.rglob("*.safetensors"):
            # safetensors writes files with mode 0600, but another user may serve the model.
            file.chmod(0o644)
    parallel.barrier()


def _write_weights(folder: Path | None, language_model: PreTrainedModel, weights: ShardedWeights) -> None:
    """Write the files of weights, and their index where there are several; without a folder only gather."""
    planned: dict[str, Tensor] = {}
    for group in _groups(_empty(language_model, weights)):
        planned |= _of_checkpoint(language_model, group)
    split = split_torch_state_dict_into_shards(planned, filename_pattern=_FILES, max_shard_size=SHARD_BYTES)
    held: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for values in _groups(_values(language_model, weights, is_kept=folder is not None)):
        kept = {name: value for name, value in values.items() if value is not None}
        if folder is None:
            continue
        for name, tensor in _of_checkpoint(language_model, kept).items():
            file = split.tensor_to_filename[name]
            held[file][name] = tensor.contiguous()
            if len(held[file]) == len(split.filename_to_tensors[file]):
                save_file(held.pop(file), folder / file, metadata={"format": "pt"})
    assert not held, f"{sorted(held)} are not complete"
    if folder is not None and split.is_sharded:
        count = sum(tensor.numel() for tensor in planned.values())
        metadata = {"total_parameters": count, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _empty(language_model: PreTrainedModel, weights: ShardedWeights) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and shapes of the tensors that are written."""
    for spec in weights.specs():
        yield spec.name, torch.empty(spec.shape, dtype=torch.bfloat16, device="meta")
    for name, buffer in _buffers(language_model):
        yield name, torch.empty(buffer.shape, dtype=torch.bfloat16, device="meta")


def _values(
    language_model: PreTrainedModel, weights: ShardedWeights, *, is_kept: bool
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the same tensors with their values, in host memory on the rank that keeps them."""
    for spec, tensor in zip(weights.specs(), weights.gather(), strict=True):
        # A gathered tensor is freed with its layer.
        yield spec.name, tensor.to("cpu", copy=True) if is_kept else None
    for name, buffer in _buffers(language_model):
        yield name, buffer.to("cpu", torch.bfloat16, copy=True) if is_kept else None


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
