"""Workers that compute sums, for tests of how groups are called. Importable in Ray's processes."""

from __future__ import annotations

import os
import time

import ray
import torch

from ppojob_trainer.protocol import DataProto, Keys, Meta
from ppojob_trainer.worker_groups.dispatch import Dispatch, Execute, Metrics, register
from ppojob_trainer.worker_groups.stored_rows import MIN_BLOCK_BYTES
from ppojob_trainer.worker_groups.worker_process import WorkerContext


class SumWorker:
    """Remembers its context, and what it was sent."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def rank_plus(self, amount: int, *, times: int = 1) -> int:
        return (self.context.rank + amount) * times

    @register(dispatch=Dispatch.ONE_TO_ALL, execute=Execute.RANK_ZERO, blocking=True)
    def only_first(self) -> list[int]:
        return [self.context.rank, self.context.world_size]

    @register(dispatch=Dispatch.RANK_ZERO)
    def process_id(self) -> int:
        return os.getpid()

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[str, int]:
        """Return the Ray node, and how many ranks of the group this one believes to be there."""
        return ray.get_runtime_context().get_node_id(), self.context.local_world_size

    @register(dispatch=Dispatch.ALL_TO_ALL)
    def own(self, mine: str) -> str:
        return f"{self.context.rank}:{mine}"

    @register(dispatch=Dispatch.ALL_TO_ALL, blocking=True)
    def own_number(self, mine: int) -> int:
        return self.context.rank * mine

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto) -> DataProto:
        """Return twice the values, and who computed them."""
        ranks = torch.full((len(batch),), self.context.rank)
        return DataProto.from_dict(
            {"doubled": 2 * batch.tensor("numbers"), "rank": ranks}, meta_info={Meta.METRICS: {"seen": [len(batch)]}}
        )

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def double_after(self, batch: DataProto, file: str) -> DataProto:
        """Return twice the values once a file exists.

        Raises:
            TimeoutError: it does not exist after five minutes.
        """
        deadline = time.monotonic() + 300
        while not os.path.exists(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{file} does not exist after five minutes")
            time.sleep(0.02)
        return DataProto.from_dict({"doubled": 2 * batch.tensor("numbers")})

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def widen(self, batch: DataProto) -> DataProto:
        """Return a MiB for each value."""
        return DataProto.from_dict({"wide": batch.tensor("numbers")[:, None].repeat(1, MIN_BLOCK_BYTES // 8)})

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO)
    def double_together(self, batch: DataProto) -> DataProto:
        """Return twice the values, and who computed them; a peer's rows are kept for `seen_together`."""
        self.together: list[int] = batch.tensor("numbers").tolist()
        ranks = torch.full((len(batch),), self.context.rank)
        return DataProto.from_dict({"doubled": 2 * batch.tensor("numbers"), "rank": ranks})

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def seen_together(self) -> list[int]:
        return self.together

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO)
    def fail_together(self, batch: DataProto) -> DataProto:
        """Fail on the last of the peers, whose answer nobody reads."""
        if self.context.rank == self.context.world_size - 1:
            raise ZeroDivisionError("of a peer")
        return batch

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO, reads=("numbers", Keys.RESPONSE_MASK))
    def double_declared(self, batch: DataProto, column: str = "numbers") -> DataProto:
        """Return twice the values of a column, of which `numbers` is declared."""
        return DataProto.from_dict({"doubled": 2 * batch.tensor(column)})

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC)
    def count(self, batch: DataProto) -> Metrics:
        mask = batch.ragged(Keys.RESPONSE_MASK)
        return {"tokens": float(mask.values.sum()), "rows/max": float(len(batch)), "scale": batch.meta_info["scale"]}

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> None:
        if self.context.rank == rank:
            raise ZeroDivisionError("of the worker's own")

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def lose_gpu_on(self, rank: int) -> None:
        """Fail as torch does if the GPU of the process has failed."""
        if self.context.rank == rank:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int) -> None:
        if self.context.rank == rank:
            os._exit(9)
        time.sleep(1)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def say(self, text: str) -> str:
        os.write(1, f"{text}\n".encode())
        return os.environ["OMP_NUM_THREADS"]
