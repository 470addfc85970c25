"""Segments of PyTorch's allocator on a GPU. Needs PyTorch with CUDA.

It runs in another process, because the setting is for a whole process, and the other tests use the default.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.gpu.two_ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
]

MIB = 1 << 20


def seen() -> dict[str, bool]:
    """Return for which memory the allocator extends segments."""
    import torch

    from ppojob_trainer.engines.allocator import ordinary_segments, use_expandable_segments

    def is_expandable(tensor: torch.Tensor) -> bool:
        place = tensor.data_ptr()
        [segment] = [
            segment
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if segment["address"] <= place < segment["address"] + segment["total_size"]
        ]
        return bool(segment["is_expandable"])

    use_expandable_segments()
    first = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    found = {"first": is_expandable(first)}
    del first
    with ordinary_segments():
        # Free memory of the right size is there, but in an expandable segment.
        shared = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    small = torch.empty(1, dtype=torch.uint8, device="cuda")
    large = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    return found | {"shared": is_expandable(shared), "small": is_expandable(small), "large": is_expandable(large)}


def test_shared_memory_alone_is_in_ordinary_segments(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(1, sys.modules[__name__], [], limit=100)
    out, _ = capfd.readouterr()
    assert json.loads(out.splitlines()[-1]) == {"first": True, "shared": False, "small": True, "large": True}


if __name__ == "__main__":
    print(json.dumps(seen()))
