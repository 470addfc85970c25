"""One rank's part of the work of a layout: joins the other ranks, and leaves them whatever happens."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.network import connect
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group


def in_layout(
    device: Device,
    rank: int,
    dims: ParallelDims,
    port: int,
    work: Callable[[ParallelMesh], dict[str, Any]],
    *,
    limit_s: float = 120,
) -> dict[str, Any]:
    """Return what the work returns; if it fails, {"error": the traceback}, because other layouts are tested too.

    Args:
        port: where rank 0's store listens on this machine.
        limit_s: longest wait for the other ranks, in seconds.
    """
    parallel = init_process_group(device, rank, dims, connect("127.0.0.1", port, limit_s), limit_s)
    try:
        found = work(parallel)
    except Exception:  # noqa: BLE001 - see above; the reader of the result reports it
        found = {"error": traceback.format_exc()}
    parallel.destroy()
    gc.collect()
    torch.cuda.empty_cache()
    return found
