"""`DataProto`: a batch of sequences on its way between worker groups.

It has three parts, and every row of the first two belongs to one sequence:

    batch             tensors [B, ...] in a TensorDict (None if there are none)
    non_tensor_batch  object arrays of length B: text, token lists, dictionaries
    meta_info         small values that hold for the whole batch

Example (layout: see `protocol.layout`):

    >>> proto = DataProto.from_dict({"responses": torch.tensor([[1, 2], [3, 0]])}, {"uid": ["a", "b"]})
    >>> len(proto), [len(part) for part in proto.chunk(2)]
    (2, [1, 1])

All operations but `pop` leave the object as it is and return a new one, which may share memory with it. Called by
the worker groups and the controller's data path. It refuses to guess: sizes that do not fit, clashing keys and
unknown keys are errors with the key's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ppojob_trainer.protocol.equality import same
from ppojob_trainer.protocol.errors import ProtocolError
from ppojob_trainer.protocol.keys import Keys, Meta
from ppojob_trainer.protocol.layout import object_array
from ppojob_trainer.protocol.wire import pack_tensors, unpack_tensors

ObjectArray: TypeAlias = np.ndarray[Any, np.dtype[np.object_]]
Index: TypeAlias = int | slice | Sequence[int] | np.ndarray[Any, Any] | Tensor

__all__ = ["DataProto", "ProtocolError"]


@dataclass(eq=False)
class DataProto:
    """See the module's docstring. Build it with `from_dict`, which checks the sizes."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, ObjectArray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = len(self)
        if self.batch is not None and self.batch.batch_dims != 1:
            raise ProtocolError(f"batch must have one batch dimension, it has batch_size {list(self.batch.batch_size)}")
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.dtype != object or array.ndim != 1:
                raise ProtocolError(f"non-tensor field {key!r} must be a 1-d object array: wrap it with object_array()")
            if len(array) != size:
                raise ProtocolError(f"non-tensor field {key!r} has {len(array)} rows, the batch has {size}")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | ObjectArray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Build one from tensors [B, ...] and sequences of length B.

        Raises:
            ProtocolError: a field's first dimension differs from the others'; names the field.
        """
        batch = None
        if tensors:
            first, size = next((key, value.shape[0] if value.dim() else 0) for key, value in tensors.items())
            for key, value in tensors.items():
                if value.dim() == 0 or value.shape[0] != size:
                    raise ProtocolError(f"field {key!r} has shape {list(value.shape)}, but {first!r} has {size} rows")
            batch = TensorDict(dict(tensors), batch_size=[size])
        arrays = {key: object_array(value) for key, value in (non_tensors or {}).items()}
        return cls(batch, arrays, dict(meta_info or {}))

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    def keys(self) -> set[str]:
        """Names of all fields, tensors and others."""
        return {*self.tensors(), *self.non_tensor_batch}

    def __getitem__(self, index: Index) -> DataProto:
        """Rows by slice, index list or boolean mask; a single int gives a batch of one row."""
        if isinstance(index, (int, np.integer)):
            row = int(index) + len(self) if index < 0 else int(index)
            if not 0 <= row < len(self):
                raise IndexError(f"row {index} of a batch of {len(self)}")
            index = slice(row, row + 1)
        if isinstance(index, slice):
            return self._rows(index, index)
        rows = torch.as_tensor(index)
        if rows.dtype == torch.bool:
            if rows.shape != (len(self),):
                raise ProtocolError(f"boolean mask of shape {list(rows.shape)} for a batch of {len(self)}")
            rows = rows.nonzero().flatten()
        rows = rows.cpu().long()
        return self._rows(rows, rows.numpy())

    def _rows(self, tensor_index: slice | Tensor, array_index: slice | np.ndarray[Any, Any]) -> DataProto:
        batch = None if self.batch is None else self.batch[tensor_index]
        arrays = {key: array[array_index] for key, array in self.non_tensor_batch.items()}
        return DataProto(batch, arrays, dict(self.meta_info))

    # Fields.

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor fields as a new dictionary; the tensors are not copied."""
        return {} if self.batch is None else cast("dict[str, Tensor]", dict(self.batch.items()))

    def tensor(self, key: str) -> Tensor:
        """Return the tensor field `key`; a missing one is an error that says which there are."""
        tensors = self.tensors()
        if key not in tensors:
            raise ProtocolError(f"no tensor field {key!r}; there are {sorted(tensors)}")
        return tensors[key]

    def array(self, key: str) -> ObjectArray:
        """Return the non-tensor field `key`; a missing one is an error that says which there are."""
        if key not in self.non_tensor_batch:
            raise ProtocolError(f"no non-tensor field {key!r}; there are {sorted(self.non_tensor_batch)}")
        return self.non_tensor_batch[key]

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Return only the named fields; None keeps all of that part."""
        tensors = self.tensors() if batch_keys is None else {key: self.tensor(key) for key in batch_keys}
        arrays = self.non_tensor_batch
        if non_tensor_batch_keys is not None:
            arrays = {key: self.array(key) for key in non_tensor_batch_keys}
        meta = self.meta_info
        if meta_info_keys is not None:
            meta = {key: self._meta(key) for key in meta_info_keys}
        batch = TensorDict(tensors, batch_size=[len(self)]) if tensors else None
        return DataProto(batch, dict(arrays), dict(meta))

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:
        """Take the named fields out of this object and return them as a new one."""
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        if self.batch is not None:
            left = {key: value for key, value in self.tensors().items() if key not in batch_keys}
            # A TensorDict without fields would keep the size of rows that are nowhere.
            self.batch = TensorDict(left, batch_size=[len(self)]) if left else None
        for key in non_tensor_batch_keys:
            del self.non_tensor_batch[key]
        for key in meta_info_keys:
            del self.meta_info[key]
        return taken

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors and arrays; of arrays of objects only the references."""
        tensors = sum(tensor.nbytes for tensor in self.tensors().values())
        return tensors + sum(array.nbytes for array in self.non_tensor_batch.values())

    def with_fields(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | ObjectArray] | None = None,
    ) -> DataProto:
        """Return a copy with these fields added or replaced (`union` is for fields that must not clash)."""
        merged = {**self.tensors(), **(tensors or {})}
        return DataProto.from_dict(merged, {**self.non_tensor_batch, **(non_tensors or {})}, self.meta_info)

    def union(self, other: DataProto) -> DataProto:
        """Return the fields of both. A field that both have must be equal.

        Raises:
            ProtocolError: the sizes differ, or both have a key with different values; names the key.
        """
        if self.keys() and other.keys() and len(self) != len(other):
            raise ProtocolError(f"union of {len(self)} rows with {len(other)} rows: they are not of the same sequences")
        tensors = _merge(self.tensors(), other.tensors(), "tensor field")
        arrays = _merge(self.non_tensor_batch, other.non_tensor_batch, "non-tensor field")
        meta = _merge(self.meta_info, other.meta_info, "meta_info entry")
        return DataProto.from_dict(tensors, arrays, meta)

    def _meta(self, key: str) -> Any:
        if key not in self.meta_info:
            raise ProtocolError(f"no meta_info entry {key!r}; there are {sorted(self.meta_info)}")
        return self.meta_info[key]

    # Rows.

    def split(self, size: int) -> list[DataProto]:
        """Split into parts of `size` rows, the last may be smaller. meta_info goes to all of them."""
        if size < 1:
            raise ProtocolError(f"split into parts of {size} rows: a part has at least one")
        return [self[start : start + size] for start in range(0, len(self), size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split into `chunks` parts of equal size, in order.

        Raises:
            ProtocolError: the rows cannot be divided equally; `pad_to_divisor` first.
        """
        if chunks < 1 or len(self) % chunks:
            raise ProtocolError(
                f"{len(self)} rows cannot be split into {chunks} equal chunks: pad_to_divisor({chunks}) first"
            )
        size = len(self) // chunks
        return [self[part * size : (part + 1) * size] for part in range(chunks)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """Put the rows of all parts under each other, in order.

        All parts need the same fields. meta_info entries must be equal where several parts have them, but for
        `Meta.METRICS`, whose lists are joined.

        Raises:
            ProtocolError: no parts, fields that only some parts have, or unequal meta_info; names the key.
        """
        if not parts:
            raise ProtocolError("concat of no parts: at least one is needed to know the fields")
        first = parts[0]
        for number, part in enumerate(parts):
            if part.keys() != first.keys():
                raise ProtocolError(
                    f"part {number} of concat differs from part 0 in the fields {sorted(part.keys() ^ first.keys())}"
                )
        tensors = {key: torch.cat([part.tensor(key) for part in parts]) for key in first.tensors()}
        arrays = {key: np.concatenate([part.array(key) for part in parts]) for key in first.non_tensor_batch}
        return DataProto.from_dict(tensors, arrays, _concat_meta([part.meta_info for part in parts]))

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Repeat every row: a a b b with `interleave`, else a b a b."""
        rows = torch.arange(len(self))
        return self[rows.repeat_interleave(times) if interleave else rows.repeat(times)]

    def reorder(self, indices: Sequence[int] | Tensor) -> DataProto:
        """Return the rows in the order of `indices`, which must be a permutation."""
        order = torch.as_tensor(indices).long()
        if not torch.equal(order.sort().values.cpu(), torch.arange(len(self))):
            raise ProtocolError(f"reorder needs a permutation of 0..{len(self) - 1}, got {order.tolist()[:16]}")
        return self[order]

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """Append rows until `divisor` divides the length; return the batch and the number of rows added.

        The rows are copies of the first ones, so every operation works on them, but their response_mask (if there
        is one) is 0: they weigh nothing in masked sums and losses. `unpad` takes them away. An empty batch stays empty.
        """
        num_padding = -len(self) % divisor
        if num_padding == 0:
            return self, 0
        padding = self[torch.arange(num_padding) % len(self)]
        if Keys.RESPONSE_MASK in padding:
            padding = padding.with_fields({Keys.RESPONSE_MASK: torch.zeros_like(padding.tensor(Keys.RESPONSE_MASK))})
        padding.meta_info.pop(Meta.METRICS, None)
        return DataProto.concat([self, padding]), num_padding

    def unpad(self, num_padding: int) -> DataProto:
        """Take the last `num_padding` rows away."""
        if not 0 <= num_padding <= len(self):
            raise ProtocolError(f"cannot take {num_padding} rows of padding from {len(self)} rows")
        return self[: len(self) - num_padding]

    def make_iterator(self, mini_batch_size: int, epochs: int = 1, seed: int | None = None) -> Iterator[DataProto]:
        """Yield minibatches, `epochs` times over all rows.

        With a seed each epoch has a new order, the same on every machine; with None the order is that of the rows.

        Raises:
            ProtocolError: at once, if the size does not divide the number of rows.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ProtocolError(f"minibatches of {mini_batch_size} rows do not divide the batch of {len(self)}")
        return self._iterate(mini_batch_size, epochs, seed)

    def _iterate(self, mini_batch_size: int, epochs: int, seed: int | None) -> Iterator[DataProto]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            shuffled = self if generator is None else self[torch.randperm(len(self), generator=generator)]
            yield from shuffled.split(mini_batch_size)

    def to(self, device: torch.device | str) -> DataProto:
        """Return the batch with its tensors on `device`."""
        batch = None if self.batch is None else self.batch.to(device)
        return DataProto(batch, dict(self.non_tensor_batch), dict(self.meta_info))

    # Pickle: a batch arrives on the CPU, in memory that the receiver owns.

    def __getstate__(self) -> dict[str, Any]:
        tensors = None if self.batch is None else pack_tensors(self.tensors())
        return {"size": len(self), "tensors": tensors, "arrays": self.non_tensor_batch, "meta": self.meta_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state["tensors"]
        self.batch = None if packed is None else TensorDict(unpack_tensors(packed), batch_size=[state["size"]])
        self.non_tensor_batch = state["arrays"]
        self.meta_info = state["meta"]


def _merge(mine: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> dict[str, Any]:
    merged = dict(mine)
    for key, value in theirs.items():
        if key in merged and not same(merged[key], value):
            raise ProtocolError(f"union: both sides have the {what} {key!r}, with different values")
        merged.setdefault(key, value)
    return merged


def _concat_meta(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    metrics: dict[str, list[float]] = {}
    for key, value in (item for meta in metas for item in meta.items()):
        if key == Meta.METRICS:
            for name, values in value.items():
                metrics.setdefault(name, []).extend(values)
        elif key in merged and not same(merged[key], value):
            raise ProtocolError(f"concat: the parts have different values for the meta_info entry {key!r}")
        else:
            merged.setdefault(key, value)
    return {**merged, Meta.METRICS: metrics} if metrics else merged
