"""Exports the policy as a HuggingFace folder, the result of a run.

Called by the engine. The weights are gathered a layer at a time, and each rank writes its share of the files
(`export_files`): it holds at most about `SHARD_BYTES` and a layer, however large the model is. Rank 0 writes the
adapters, a tensor at a time, and the rest when all weights are written, the index last. Files and index have the names
that `from_pretrained` and vLLM read. It refuses a folder that is not empty.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.engines.errors import CheckpointUnwritableError
from ppojob_trainer.engines.train.fsdp.background_saves import first_line
from ppojob_trainer.engines.train.fsdp.checkpoint import refuse_existing
from ppojob_trainer.engines.train.fsdp.export_files import ExportFiles, plan_files
from ppojob_trainer.engines.train.fsdp.lora import ADAPTER_FOLDER, AdapterFiles, write_adapters
from ppojob_trainer.engines.train.fsdp.stages import Stage
from ppojob_trainer.engines.train.fsdp.weights import ShardedWeights
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.exports.target import MANIFEST

SHARD_BYTES: Final = 5 * 10**9
"""Size of a weight file in bytes, as in most folders on the HuggingFace hub."""

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
    planned = {one.name: torch.empty(one.shape, dtype=one.torch_dtype, device="meta") for one in weights.specs()}
    plan = plan_files(planned, parallel.world_size, SHARD_BYTES)
    failed = _write_weights(ExportFiles(folder, plan.of(parallel.rank)), weights)
    is_first = parallel.rank == 0
    if lora is not None:
        shapes = weights.adapter_shapes()
        gathered = _checked(weights.gather_adapters(), shapes.values())
        if is_first and failed is None:
            files = AdapterFiles(lora, str(source), weights.adapted_parameters())
            failed = _write_adapters(folder, shapes, gathered, files)
        # Collective: other ranks gather with the one that writes, which gathers what is left if its storage failed.
        deque(gathered, maxlen=0)
    failure = parallel.first_text("" if failed is None else f"rank {parallel.rank}: {first_line(failed)}")
    if failure:
        raise CheckpointUnwritableError(
            f"the export {folder} cannot be written: {failure}. Check the storage's free space and permissions; "
            "earlier exports and checkpoints are complete"
        )
    if is_first:
        _complete(folder, language_model, source, plan.index)
    parallel.barrier()


def _write_weights(files: ExportFiles, weights: ShardedWeights) -> Exception | None:
    """Gather all weights, and write this rank's files; return why it could not."""
    for spec, tensor in zip(weights.specs(), weights.gather(), strict=True):
        if spec.name in files.names:
            # A gathered tensor is freed with its layer.
            files.add(spec.name, tensor.to("cpu", copy=True))
    return files.finish()


def _write_adapters(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], gathered: Iterator[Tensor], files: AdapterFiles
) -> OSError | None:
    """Write the adapters' folder; return why it could not be written. Tensors may be left in `gathered` then."""
    try:
        write_adapters(folder / ADAPTER_FOLDER, shapes, gathered, files)
    except OSError as error:
        return error
    return None


def _checked(gathered: Iterable[Tensor], shapes: Collection[tuple[int, ...]]) -> Iterator[Tensor]:
    """Yield tensors, which must be float32 and of these shapes: on each rank, so that none waits for one that fails."""
    for shape, tensor in zip(shapes, gathered, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.float32), "not the shape of its header"
        yield tensor


def _complete(folder: Path, language_model: PreTrainedModel, source: Path, index: Mapping[str, object] | None) -> None:
    """Write everything but the weights and the adapters. The index comes last: weights are found through it."""
    _copy_companions(source, folder)
    _write_configs(language_model, folder)
    if index is not None:
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_configs(language_model: PreTrainedModel, folder: Path) -> None:
    """Write the configurations, because the loaded one says float32 and no cache.

    Layers for the prediction of further tokens (MTP) are neither loaded nor trained, so an export has none.
    """
    config = copy.deepcopy(language_model.config)
    config.dtype, config.use_cache = torch.bfloat16, True
    if getattr(config, "num_mtp_layers", 0):
        config.num_mtp_layers = 0
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
