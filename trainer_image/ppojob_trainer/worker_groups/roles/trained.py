"""What actor, critic and ref have in common: ranks that compute one sharded model together.

Base classes of those roles' workers and groups. A rank meets the others before it loads anything; a path that does
not exist is found before any process has spent minutes on loading.
"""

from __future__ import annotations

from typing import TypeVar

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.fsdp.mesh import DataParallel
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import Seat

__all__ = ["TrainedWorker", "check_model", "join"]

W = TypeVar("W", bound="TrainedWorker")


def check_model(path: str, trust_remote_code: bool) -> None:
    """Read the configuration of a model, seconds before its weights are loaded.

    Raises:
        ModelNotFoundError: there is none.
    """
    # Imported here: transformers takes seconds, and the driver imports this module too.
    from ppojob_trainer.engines.fsdp.model import LoadOptions, read_config

    read_config(path, LoadOptions(trust_remote_code=trust_remote_code))


class TrainedWorker:
    """A rank of a sharded model."""

    def __init__(self, seat: Seat, spec: PPOJobSpec) -> None:
        self.seat = seat
        self.spec = spec
        self._parallel: DataParallel | None = None

    @property
    def parallel(self) -> DataParallel:
        """This rank's place among the others."""
        assert self._parallel is not None, "join() comes first"
        return self._parallel

    @register(dispatch=Dispatch.RANK_ZERO)
    def rendezvous(self) -> tuple[str, int]:
        """Return where rank 0 will listen."""
        from ppojob_trainer.engines.network import free_port

        return self.seat.address, free_port(self.seat.address)

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def join(self, address: str, port: int) -> None:
        """Meet the other ranks.

        Raises:
            RendezvousError: not all came in time.
        """
        from ppojob_trainer.engines.fsdp.mesh import init_process_group

        seat = self.seat
        self._parallel = init_process_group(
            Device(self.spec.device), seat.rank, seat.world_size, address, port, seat.timeout_s
        )


async def join(group: WorkerGroup[W]) -> None:
    """Have all ranks of a group meet at rank 0."""
    address, port = await group.call(TrainedWorker.rendezvous)
    await group.call(TrainedWorker.join, address, port)
