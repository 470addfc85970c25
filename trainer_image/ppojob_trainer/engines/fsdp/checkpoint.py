"""Checkpoints of one model in training, and the HuggingFace folder that is the product of a run.

Called by the engines; where the folders lie, and which of them counts, is for the caller. A checkpoint can be read by
any number of ranks (`torch.distributed.checkpoint`). Frozen weights are not in it: with adapters it holds these alone,
and the model comes from its own path again. It refuses a folder that exists: what an older save left there would be
read as part of the new one.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import PreTrainedModel

from ppojob_api.v1alpha1.model import LoRA
from ppojob_trainer.engines.errors import CheckpointUnreadableError
from ppojob_trainer.engines.fsdp.background_saves import BackgroundSaves, bucket_failed, first_line, unwritable
from ppojob_trainer.engines.fsdp.lora import ADAPTER_FOLDER, merge_all, write_adapters
from ppojob_trainer.engines.fsdp.mesh import DataParallel
from ppojob_trainer.engines.fsdp.object_storage import (
    ObjectStoreError,
    has_metadata,
    is_of_store,
    is_used,
    reader_of,
    writer_of,
)
from ppojob_trainer.engines.fsdp.offload import Residence
from ppojob_trainer.engines.fsdp.optimizer import Optimizer

MODEL, OPTIMIZER, PROGRESS = "model", "optimizer", "progress"
# Frozen weights are not loaded, so torch must not ask for all; what the checkpoint lacks is found in reading it.
_TRAINED: Final = StateDictOptions(strict=False)
# Weights are written anew; everything else of the model's folder belongs to the tokenizer or to remote code.
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "config.json")


def save(
    location: str | Path,
    module: nn.Module,
    optimizer: Optimizer,
    parallel: DataParallel,
    residence: Residence,
    background: BackgroundSaves | None = None,
) -> None:
    """Write model, optimizer, schedule and this rank's random numbers into a new place. Collective.

    Args:
        location: a folder, or an address in an object store.
        residence: what is offloaded is written from the host's memory.
        background: with it, this returns when all is copied to the host, and the rest is written meanwhile.

    Raises:
        FileExistsError: there is something already.
        CheckpointUnwritableError: the storage refused it.
        BucketFailedError: the object store failed.
    """
    try:
        _refuse_existing(location, parallel)
        writer = writer_of(location)
    except ObjectStoreError as error:
        raise unwritable(location, error) from error
    with residence.as_it_lies() as placed:
        state = placed(_state(module, optimizer))
        state |= {_random_key(parallel.rank, name): value for name, value in _random_states(parallel).items()}
        if background is not None:
            background.start(state, location, writer)
            return
        try:
            dcp_save(state, storage_writer=writer)
        except (CheckpointException, OSError) as error:
            raise unwritable(location, error) from error


def load(location: str | Path, module: nn.Module, optimizer: Optimizer, parallel: DataParallel) -> None:
    """Read what `save` wrote, on any number of ranks. Collective.

    Random numbers go on only on ranks that were there at the save.

    Raises:
        CheckpointUnreadableError: it is missing, incomplete or of another model.
        BucketFailedError: the object store failed.
    """
    if not _has_metadata(location):
        raise CheckpointUnreadableError(
            f"checkpoint {location} is not complete: it has no .metadata, which is written last"
        )
    try:
        reader = reader_of(location)
        known = reader.read_metadata().state_dict_metadata
        random = {_random_key(parallel.rank, name): value for name, value in _random_states(parallel).items()}
        random = {key: value for key, value in random.items() if key in known}
        state = _state(module, optimizer) | random
        dcp_load(state, storage_reader=reader)
        set_state_dict(
            module,
            optimizer.adamw,
            model_state_dict=state[MODEL],
            optim_state_dict=state[OPTIMIZER],
            options=_TRAINED,
        )
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        if is_of_store(error):
            raise bucket_failed(location, "read", error) from error
        raise CheckpointUnreadableError(
            f"checkpoint {location} cannot be read into this model: {first_line(error)}. Keep model and algorithm as "
            "they were, or begin a new run under another name"
        ) from error
    optimizer.load_state_dict(state[PROGRESS])
    _set_random_states({key.rsplit("/", 1)[1]: state[key] for key in random}, parallel)


def export(
    folder: Path, language_model: PreTrainedModel, source: Path, parallel: DataParallel, lora: LoRA | None = None
) -> None:
    """Write a HuggingFace folder with bfloat16 weights, and the tokenizer of `source`. Collective; rank 0 writes.

    Adapters are merged into the weights, and lie in the subfolder `adapter` once more, in peft's format and float32.

    Raises:
        FileExistsError: the folder has something in it.
    """
    _refuse_existing(folder, parallel)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full: dict[str, Any] = get_model_state_dict(language_model, options=options)
    if parallel.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_companions(source, folder)
        if lora is not None:
            write_adapters(folder / ADAPTER_FOLDER, full, lora, base=str(source))
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in merge_all(language_model, full).items()}
        language_model.save_pretrained(folder, state_dict=weights)
        _write_config(language_model, folder)
        for file in folder.rglob("*.safetensors"):
            # safetensors writes 0600, and who serves the model may be another user.
            file.chmod(0o644)
    parallel.barrier()


def _state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return what a checkpoint holds but for random numbers, sharded."""
    has_stepped = bool(optimizer.adamw.state)
    model_state, optimizer_state = get_state_dict(module, optimizer.adamw)
    if not has_stepped:
        # torch has made the moments by a step that changes nothing else, but it counts, and the first update would be
        # another one after a save.
        for state in optimizer.adamw.state.values():
            state["step"].zero_()
    # Both names of tied weights: torch's own option to leave out what is frozen forgets the second.
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    trained = {name: value for name, value in model_state.items() if name not in frozen}
    return {MODEL: trained, OPTIMIZER: optimizer_state, PROGRESS: optimizer.state_dict()}


def _write_config(language_model: PreTrainedModel, folder: Path) -> None:
    """Write the configuration again: the model's own says float32, and no cache."""
    config = copy.deepcopy(language_model.config)
    config.dtype, config.use_cache = torch.bfloat16, True
    config.save_pretrained(folder)


def _copy_companions(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHTS):
            shutil.copyfile(file, folder / file.name)


def _has_metadata(location: str | Path) -> bool:
    try:
        return has_metadata(location)
    except ObjectStoreError as error:
        raise bucket_failed(location, "read", error) from error


def _refuse_existing(location: str | Path, parallel: DataParallel) -> None:
    has_something = is_used(location)
    # All ranks look before any of them writes.
    parallel.barrier()
    if has_something:
        raise FileExistsError(f"{location} exists: a checkpoint or an export goes into a new folder")


def _random_states(parallel: DataParallel) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if parallel.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(parallel.device)
    return states


def _set_random_states(states: dict[str, Tensor], parallel: DataParallel) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], parallel.device)


def _random_key(rank: int, name: str) -> str:
    return f"random/{rank}/{name}"
