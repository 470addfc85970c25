"""Deep equality of field values, where `==` on tensors and arrays gives no bool. Used by `DataProto.union`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def same(left: Any, right: Any) -> bool:
    """True if both values are equal: tensors and arrays by dtype, shape and content (NaN equals NaN)."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return _same_tensors(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return _same_arrays(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or (isinstance(left, float) and left != left and right != right)


def _same_tensors(left: Any, right: Any) -> bool:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    right = right.to(left.device)
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _same_arrays(left: Any, right: Any) -> bool:
    if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)):
        return False
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == object:
        return all(map(same, left.flat, right.flat))
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind == "f"))
