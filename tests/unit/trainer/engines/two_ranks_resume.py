"""One of two ranks: resumes from a checkpoint of one rank, and saves while it trains. Arguments: RANK PORT MODEL OUT.

OUT/one holds the checkpoint. It writes OUT/background (saved before the last update) and OUT/rank-<n>.pt.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.network import connect
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines.two_ranks import WORLD_SIZE, make_critic, make_policy, shard


def go_on(parallel: ParallelMesh, model: Path, batch: DataProto, folder: Path) -> dict[str, Any]:
    """Everything that is compared between one rank and two."""
    policy, critic = make_policy(parallel, model), make_critic(parallel, model)
    policy.restore(folder / "one" / "actor")
    critic.restore(folder / "one" / "critic")
    return {"first": {**policy.update(batch), **critic.update(batch)}, "policy": policy}


def main() -> None:
    rank, port, model, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    parallel = init_process_group(
        Device.CPU, rank, ParallelDims(shard=WORLD_SIZE), connect("127.0.0.1", port, 200), 200
    )
    seen = go_on(parallel, model, shard(rank), out)
    policy = seen.pop("policy")
    policy.save(out / "background", in_background=True)
    # Its collectives and weights must not meet those of the save.
    seen["second"] = policy.update(shard(rank))
    del seen["second"]["timing_s/checkpoint/wait_actor"]
    deadline = time.monotonic() + 300
    while not policy.is_saved():
        assert time.monotonic() < deadline, "the save in the background did not end"
        time.sleep(0.05)
    torch.save(seen, out / f"rank-{rank}.pt")
    parallel.destroy()


if __name__ == "__main__":
    main()
