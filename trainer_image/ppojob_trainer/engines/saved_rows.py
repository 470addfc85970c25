"""Rows of a batch as a file of a checkpoint, in the safetensors format: responses that wait for their training.

Each column is two tensors of the file, `<name>/values` and `<name>/lengths`. Called by the data role. Only the
rollout's columns are saved: prompts and what belongs to them are read from the data again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ppojob_trainer.checkpoints import BucketError
from ppojob_trainer.checkpoints.address import is_address
from ppojob_trainer.checkpoints.bucket import connect
from ppojob_trainer.checkpoints.durable import sync
from ppojob_trainer.engines.errors import BucketFailedError, CheckpointUnreadableError, CheckpointUnwritableError
from ppojob_trainer.protocol import Ragged

__all__ = ["load_rows", "save_rows"]


_VALUES, _LENGTHS = "/values", "/lengths"


def save_rows(location: str, columns: Mapping[str, Ragged]) -> None:
    """Write the columns to a new file, or to a key of an object store.

    Raises:
        CheckpointUnwritableError: the storage refused the write.
        BucketFailedError: the object store failed.
    """
    values = {f"{name}{_VALUES}": column.values.contiguous() for name, column in columns.items()}
    lengths = {f"{name}{_LENGTHS}": column.lengths.clone() for name, column in columns.items()}
    content = save({**values, **lengths})
    folder, _, name = location.rpartition("/")
    try:
        if is_address(location):
            connect(folder).overwrite(name, content)
            return
        path = Path(location)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        sync(path)
    except BucketError as error:
        raise BucketFailedError(f"the responses in the queue cannot be written to {location}: {error}") from error
    except OSError as error:
        raise CheckpointUnwritableError(
            f"the responses in the queue cannot be written to {location}: {error}. Check the storage's free space and "
            "permissions; earlier checkpoints are complete"
        ) from error


def load_rows(location: str) -> dict[str, Ragged]:
    """Return the columns of `save_rows`.

    Raises:
        CheckpointUnreadableError: the file is missing, is no such file, or is of an earlier version.
        BucketFailedError: the object store failed.
    """
    tensors = _read(location)
    names = [name.removesuffix(_VALUES) for name in tensors if name.endswith(_VALUES)]
    if {f"{name}{part}" for name in names for part in (_VALUES, _LENGTHS)} != tensors.keys():
        raise CheckpointUnreadableError(
            f"the responses in the queue cannot be read from {location}: it has the tensors {sorted(tensors)}, and a "
            "column is a pair of /values and /lengths. Earlier versions wrote padded tensors: resume with the image "
            "that wrote this checkpoint, or start a new run from its exported model"
        )
    return {name: Ragged(tensors[f"{name}{_VALUES}"], tensors[f"{name}{_LENGTHS}"]) for name in names}


def _read(location: str) -> dict[str, Tensor]:
    folder, _, name = location.rpartition("/")
    try:
        if not is_address(location):
            return load(Path(location).read_bytes())
        found = connect(folder).read(name)
    except BucketError as error:
        raise BucketFailedError(f"the responses in the queue cannot be read from {location}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointUnreadableError(
            f"the responses in the queue cannot be read from {location}: {error}"
        ) from error
    if found is None:
        raise CheckpointUnreadableError(f"the responses in the queue cannot be read: {location} is missing")
    return load(found.content)
