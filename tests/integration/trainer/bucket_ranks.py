"""One of two ranks: saves twice into a bucket, and hangs inside the second save. Arguments: RANK PORT MODEL OUT FIRST.

FIRST is the address of the first checkpoint; that of the second comes in OUT/second. It writes OUT/saved-<rank> after
the first save, and OUT/rank-<rank>.pt with the metrics of the update between the two.
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
from ppojob_trainer.engines.train.fsdp.object_storage import ObjectFiles
from ppojob_trainer.engines.train.mesh import init_process_group
from tests.unit.trainer.engines.two_ranks import WORLD_SIZE, make_critic, make_policy, shard

LIMIT_S = 600.0


def until(is_so: Any) -> None:
    """Wait for something."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def hang(*args: object) -> None:
    """Never come to the end of a save: the metadata gets its name last."""
    time.sleep(LIMIT_S)


def main() -> None:
    rank, port, model, out, first = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
        Path(sys.argv[4]),
        sys.argv[5],
    )
    torch.set_num_threads(1)
    parallel = init_process_group(
        Device.CPU, rank, ParallelDims(shard=WORLD_SIZE), connect("127.0.0.1", port, 300), 300
    )
    policy, critic = make_policy(parallel, model), make_critic(parallel, model)
    for engine in (policy, critic):
        engine.update(shard(rank))
    policy.save(f"{first}/actor")
    critic.save(f"{first}/critic", in_background=True)
    until(critic.is_saved)
    (out / f"saved-{rank}").touch()
    until((out / "second").exists)
    seen = {**policy.update(shard(rank)), **critic.update(shard(rank))}
    del seen["timing_s/checkpoint/wait_critic"]
    torch.save(seen, out / f"rank-{rank}.pt")
    ObjectFiles.rename = hang  # type: ignore[method-assign, assignment]
    policy.save(f"{(out / 'second').read_text()}/actor")


if __name__ == "__main__":
    main()
