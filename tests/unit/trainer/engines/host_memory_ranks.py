"""One of two ranks: measures the host's memory of saving, exporting and loading. Arguments: RANK PORT MODEL OUT.

It writes OUT/rank-<n>.pt: the most that each call took in addition to the memory before it, in bytes.
"""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ppojob_api.v1alpha1.model import LoRA, Offload
from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.network import connect
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp import export as export_module
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group
from tests.unit.trainer.engines.two_ranks import WORLD_SIZE, make_policy

SHARD_BYTES = 16 * 10**6


def memory(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {name}"
    return int(found[1]) * 1024


def most_taken(call: Callable[[], object]) -> int:
    gc.collect()
    # Sets the peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


def wait_for(engine: FSDPEngine) -> None:
    deadline = time.monotonic() + 120
    while not engine.is_saved():
        assert time.monotonic() < deadline, "the save in the background did not end"
        time.sleep(0.05)


def measure(parallel: ParallelMesh, model: Path, out: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    found["background, moments offloaded"] = of_background(parallel, model, out / "moments", Offload(optimizer=True))
    both = Offload(optimizer=True, parameters=True)
    found["background, both offloaded"] = of_background(parallel, model, out / "both", both)
    # Not the first one, for which Python imports the model's code.
    found["build"] = most_taken(lambda: make_policy(parallel, model))
    policy = make_policy(parallel, model, offload=Offload(optimizer=True))
    policy.save(out / "before")
    found["save, moments offloaded"] = most_taken(lambda: policy.save(out / "save"))
    found["export"] = most_taken(lambda: policy.export(out / "export"))
    adapted = make_policy(parallel, model, lora=LoRA(rank=512))
    found["export, adapters"] = most_taken(lambda: adapted.export(out / "adapted"))
    return found


def of_background(parallel: ParallelMesh, model: Path, out: Path, offload: Offload) -> int:
    policy = make_policy(parallel, model, offload=offload)
    # torch makes the moments for the first save; later ones find them where they are.
    policy.save(out / "first", in_background=True)
    wait_for(policy)

    def save() -> None:
        policy.save(out / "second", in_background=True)
        wait_for(policy)

    return most_taken(save)


def main() -> None:
    rank, port, model, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    export_module.SHARD_BYTES = SHARD_BYTES  # type: ignore[misc]
    parallel = init_process_group(
        Device.CPU, rank, ParallelDims(shard=WORLD_SIZE), connect("127.0.0.1", port, 120), 120
    )
    found = measure(parallel, model, out)
    resumed = make_policy(parallel, model)
    found["load"] = most_taken(lambda: resumed.restore(out / "save"))
    torch.save(found, out / f"rank-{rank}.pt")
    parallel.destroy()


if __name__ == "__main__":
    main()
