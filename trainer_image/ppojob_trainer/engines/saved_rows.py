"""Rows of a batch as a file of a checkpoint, in the safetensors format: responses that wait for their training.

Called by the data role. Only tensors are saved: prompts and what belongs to them are read from the data again.
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

__all__ = ["load_rows", "save_rows"]


def save_rows(location: str, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors to a new file, or to a key of an object store.

    Raises:
        CheckpointUnwritableError: the storage refused the write.
        BucketFailedError: the object store failed.
    """
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
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
            f"the responses in the queue cannot be written to {location}: {error}. Look after the storage's space and "
            "rights; the checkpoints before it are whole"
        ) from error


def load_rows(location: str) -> dict[str, Tensor]:
    """Return the tensors of `save_rows`.

    Raises:
        CheckpointUnreadableError: the file is missing, or is no such file.
        BucketFailedError: the object store failed.
    """
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
