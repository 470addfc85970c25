"""Checkpoints of one model in training, and the HuggingFace folder that is the product of a run.

Called by the engines; where the folders lie, and which of them counts, is for the caller. A checkpoint can be read by
any number of ranks (`torch.distributed.checkpoint`). It refuses a folder that exists: what an older save left there
would be read as part of the new one.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import PreTrainedModel

from ppojob_trainer.engines.errors import CheckpointUnreadableError
from ppojob_trainer.engines.fsdp.mesh import DataParallel
from ppojob_trainer.engines.fsdp.optimizer import Optimizer

MODEL, OPTIMIZER, PROGRESS = "model", "optimizer", "progress"
# Weights are written anew; everything else of the model's folder belongs to the tokenizer or to remote code.
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "config.json")


def save(folder: Path, module: nn.Module, optimizer: Optimizer, parallel: DataParallel) -> None:
    """Write model, optimizer, schedule and this rank's random numbers into the new folder. Collective.

    Raises:
        FileExistsError: the folder has something in it.
    """
    _refuse_existing(folder, parallel)
    model_state, optimizer_state = get_state_dict(module, optimizer.adamw)
    state: dict[str, Any] = {MODEL: model_state, OPTIMIZER: optimizer_state, PROGRESS: optimizer.state_dict()}
    state |= {_random_key(parallel.rank, name): value for name, value in _random_states(parallel).items()}
    dcp_save(state, checkpoint_id=folder)


def load(folder: Path, module: nn.Module, optimizer: Optimizer, parallel: DataParallel) -> None:
    """Read what `save` wrote, on any number of ranks. Collective.

    Random numbers go on only on ranks that were there at the save.

    Raises:
        CheckpointUnreadableError: the folder is missing, incomplete or of another model.
    """
    if not (folder / ".metadata").is_file():
        raise CheckpointUnreadableError(
            f"checkpoint {folder} is not complete: it has no .metadata, which is written last"
        )
    try:
        known = FileSystemReader(folder).read_metadata().state_dict_metadata
        model_state, optimizer_state = get_state_dict(module, optimizer.adamw)
        random = {_random_key(parallel.rank, name): value for name, value in _random_states(parallel).items()}
        random = {key: value for key, value in random.items() if key in known}
        state: dict[str, Any] = {MODEL: model_state, OPTIMIZER: optimizer_state, PROGRESS: optimizer.state_dict()}
        state |= random
        dcp_load(state, checkpoint_id=folder)
        set_state_dict(module, optimizer.adamw, model_state_dict=state[MODEL], optim_state_dict=state[OPTIMIZER])
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise CheckpointUnreadableError(
            f"checkpoint {folder} cannot be read into this model: {_first_line(error)}. Keep model and algorithm as "
            "they were, or begin a new run under another name"
        ) from error
    optimizer.load_state_dict(state[PROGRESS])
    _set_random_states({key.rsplit("/", 1)[1]: state[key] for key in random}, parallel)


def export(folder: Path, language_model: PreTrainedModel, source: Path, parallel: DataParallel) -> None:
    """Write a HuggingFace folder with bfloat16 weights, and the tokenizer of `source`. Collective; rank 0 writes.

    Raises:
        FileExistsError: the folder has something in it.
    """
    _refuse_existing(folder, parallel)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full: dict[str, Any] = get_model_state_dict(language_model, options=options)
    if parallel.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_companions(source, folder)
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in full.items()}
        language_model.save_pretrained(folder, state_dict=weights)
        _write_config(language_model, folder)
    parallel.barrier()


def _write_config(language_model: PreTrainedModel, folder: Path) -> None:
    """Write the configuration again: the model's own says float32, and no cache."""
    config = copy.deepcopy(language_model.config)
    config.dtype, config.use_cache = torch.bfloat16, True
    config.save_pretrained(folder)


def _copy_companions(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in _WEIGHTS):
            shutil.copyfile(file, folder / file.name)


def _refuse_existing(folder: Path, parallel: DataParallel) -> None:
    is_used = folder.exists() and any(folder.iterdir())
    # All ranks look before any of them writes.
    parallel.barrier()
    if is_used:
        raise FileExistsError(f"{folder} exists: a checkpoint or an export goes into a new folder")


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


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
