"""One rank of two, each with its GPU: connects and writes the transport. `test_transports_on_cuda` starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.network import connect
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import init_process_group
from ppojob_trainer.engines.transports import log_connections


def main() -> None:
    rank, port, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    log_connections(out / f"rank-{rank}")
    parallel = init_process_group(Device.CUDA, rank, ParallelDims(shard=2), connect("127.0.0.1", port, 120), 120)
    (out / f"rank-{rank}.json").write_text(json.dumps(parallel.connect()))
    parallel.destroy()


if __name__ == "__main__":
    main()
