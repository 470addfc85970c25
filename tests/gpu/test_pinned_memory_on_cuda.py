"""What is offloaded takes as much of the host as it has bytes, is pinned, and comes back as it was."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from ppojob_trainer.engines.train.fsdp.pinned import host_buffer

pytestmark = pytest.mark.gpu

# A rank's part of an MLP's matrix of Qwen2-7B on two GPUs; a power of two would be 268 MB.
NUM_BYTES, NUM = 135_790_592, 8


def resident() -> int:
    """Bytes of this process that are in memory, whatever runs beside it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_a_pinned_buffer_takes_its_own_size_and_gives_it_back() -> None:
    # The first copies start CUDA and its libraries, which take memory too.
    torch.zeros(1, device="cuda").cpu()
    torch.randint(256, (1,), dtype=torch.uint8, device="cuda")
    before = resident()
    buffers = [host_buffer(NUM_BYTES, pinned=True) for _ in range(NUM)]
    source = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8, device="cuda")
    for buffer in buffers:
        assert buffer.is_pinned()
        buffer.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(buffer.cuda(non_blocking=True), source) for buffer in buffers)
    taken = resident() - before
    del buffer, buffers
    gc.collect()
    left = resident() - before

    assert taken < 1.4 * NUM * NUM_BYTES
    assert left < 0.4 * NUM * NUM_BYTES


def test_small_buffers_share_no_page() -> None:
    """CUDA refuses to pin a page twice."""
    buffers = [host_buffer(7168, pinned=True) for _ in range(50)]

    assert all(buffer.is_pinned() for buffer in buffers)
