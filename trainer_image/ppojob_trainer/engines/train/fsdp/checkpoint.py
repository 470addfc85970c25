"""Checkpoints of one model in training.

Called by the engine; the caller decides where the folders are and which checkpoint is valid. A checkpoint can be read
by any number of ranks (`torch.distributed.checkpoint`). It has no frozen weights: with LoRA it has only the adapters,
and the model is loaded from its path again. It refuses a folder that exists, because files of an older save would be
read as part of the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ppojob_trainer.engines.errors import CheckpointUnreadableError
from ppojob_trainer.engines.train.fsdp.background_saves import BackgroundSaves, bucket_failed, first_line, unwritable
from ppojob_trainer.engines.train.fsdp.object_storage import (
    ObjectStoreError,
    has_metadata,
    is_of_store,
    is_used,
    reader_of,
    writer_of,
)
from ppojob_trainer.engines.train.fsdp.offload import Offloader
from ppojob_trainer.engines.train.fsdp.optimizer import Optimizer
from ppojob_trainer.engines.train.fsdp.stages import Stage
from ppojob_trainer.engines.train.mesh import ParallelMesh

MODEL, OPTIMIZER, PROGRESS = "model", "optimizer", "progress"
GROUPS, PARAMS = "param_groups", "params"
# Frozen weights are not loaded, so torch must not require all keys; missing ones are found when the checkpoint is read.
_TRAINED: Final = StateDictOptions(strict=False)


def save(
    location: str | Path,
    module: nn.Module,
    optimizer: Optimizer,
    parallel: ParallelMesh,
    offloader: Offloader,
    background: BackgroundSaves | None = None,
) -> None:
    """Write model, optimizer, schedule and this rank's random state to a new location. Collective.

    Args:
        location: a folder, or an address in an object store.
        offloader: offloaded tensors are written from its copies on the host.
        background: if given, threads copy all tensors on the device to the host, and write these copies, and offloaded
            tensors without a copy. The next update waits for the copies before it changes a parameter, and with
            offloaded tensors at its end until all is written.

    Raises:
        FileExistsError: the location is not empty.
        CheckpointUnwritableError: the storage refused the write.
        BucketFailedError: the object store failed.
    """
    try:
        refuse_existing(location, parallel)
        writer = writer_of(location)
    except ObjectStoreError as error:
        raise unwritable(location, error) from error
    if not optimizer.adamw.state:
        # torch creates the moments for a checkpoint, which it can do only on the device.
        with offloader.on_device(moments=True):
            _state(module, optimizer)
    state = _state(module, optimizer)
    state |= {_random_key(parallel.rank, name): value for name, value in _random_states(parallel).items()}
    if background is not None:
        background.start(offloader.copying(state), location, writer)
        offloader.wait_before_changes(background.wait)
        return
    try:
        dcp_save(offloader.to_save(state), storage_writer=writer)
    except (CheckpointException, OSError) as error:
        raise unwritable(location, error) from error


def load(location: str | Path, module: nn.Module, optimizer: Optimizer, parallel: ParallelMesh) -> None:
    """Read a checkpoint of `save`, on any number of ranks. Collective.

    The random state is restored only on ranks that existed at the save.

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
        # The saved groups are those of one of the stages.
        own = [group[PARAMS] for group in state[OPTIMIZER][GROUPS]]
        dcp_load(state, storage_reader=reader)
        for group, names in zip(state[OPTIMIZER][GROUPS], own, strict=True):
            group[PARAMS] = names
        _rename(state[OPTIMIZER], {shared: name for name, shared in _shared(module).items()})
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
            f"checkpoint {location} cannot be read into this model: {first_line(error)}. Use the model and algorithm "
            "that wrote it, or start a new run with another name"
        ) from error
    optimizer.load_state_dict(state[PROGRESS])
    _set_random_states({key.rsplit("/", 1)[1]: state[key] for key in random}, parallel)


def _state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the sharded state of a checkpoint, without the random state."""
    has_stepped = bool(optimizer.adamw.state)
    model_state, optimizer_state = get_state_dict(module, optimizer.adamw)
    if not has_stepped:
        # torch creates the moments by a step that changes nothing else but increments the step count, so the first
        # update after a save would differ.
        for state in optimizer.adamw.state.values():
            state["step"].zero_()
    # Both names of tied weights: torch's own option to leave out frozen weights forgets the second.
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    trained = {name: value for name, value in model_state.items() if name not in frozen}
    _rename(optimizer_state, _shared(module))
    return {MODEL: trained, OPTIMIZER: optimizer_state, PROGRESS: optimizer.state_dict()}


def _shared(module: nn.Module) -> dict[str, str]:
    """Return the name of a last stage's copy of a tied weight -> the name under which all layouts save its moments."""
    stage: Stage | None = getattr(module, "stage", None)
    if stage is None or stage.tied is None or not stage.peers.is_last:
        return {}
    embedding, output = (f"language_model.{name}" for name in stage.tied)
    return {output: embedding}


def _rename(optimizer_state: Any, names: Mapping[str, str]) -> None:
    moments = optimizer_state["state"]
    for name, other in names.items():
        if name in moments:
            moments[other] = moments.pop(name)
        for group in optimizer_state[GROUPS]:
            group[PARAMS] = [other if one == name else one for one in group[PARAMS]]


def _has_metadata(location: str | Path) -> bool:
    try:
        return has_metadata(location)
    except ObjectStoreError as error:
        raise bucket_failed(location, "read", error) from error


def refuse_existing(location: str | Path, parallel: ParallelMesh) -> None:
    """Raise FileExistsError if the location is not empty. Collective."""
    has_something = is_used(location)
    # All ranks check before any of them writes.
    parallel.barrier()
    if has_something:
        raise FileExistsError(f"{location} exists: checkpoints and exports need a new folder")


def _random_states(parallel: ParallelMesh) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if parallel.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(parallel.device)
    return states


def _set_random_states(states: dict[str, Tensor], parallel: ParallelMesh) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], parallel.device)


def _random_key(rank: int, name: str) -> str:
    return f"random/{rank}/{name}"
