"""Where the processes of a group meet, to train a model together or to transfer weights."""

from __future__ import annotations

import logging
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from ppojob_trainer.engines.allocator import use_expandable_segments
from ppojob_trainer.engines.errors import RendezvousError

logger = logging.getLogger(__name__)


def listen(address: str, timeout_seconds: float) -> TCPStore:
    """Open the store in which the ranks of a group meet, at a port that the system chooses.

    A port that is asked for first and bound later can meanwhile be taken by another process. The store lasts as long
    as the object; rank 0 joins with it, the others with `connect`.

    Args:
        address: of this host, without brackets if it is IPv6.
        timeout_seconds: for the ranks to write into the store what the others read.
    """
    return TCPStore(address, 0, None, True, timedelta(seconds=timeout_seconds), wait_for_workers=False)


def connect(address: str, port: int, timeout_seconds: float) -> TCPStore:
    """Connect to the store at which rank 0 listens.

    Raises:
        RendezvousError: nobody listened there in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    try:
        return TCPStore(address, port, None, False, timeout, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        raise RendezvousError(
            f"rank 0 did not answer at {address}:{port} within {timeout_seconds:g} s: {error}"
        ) from error


def join_process_group(
    name: str, store: Store, rank: int, world_size: int, timeout_seconds: float, *, is_cuda: bool, binds: bool = False
) -> None:
    """Join the other ranks in torch.distributed's default group: gloo on the CPU; on CUDA NCCL, and gloo for the host.

    Args:
        name: of this rank, for the error.
        store: where the ranks meet, see `listen` and `connect`.
        timeout_seconds: for the ranks to meet and for every collective afterwards.
        is_cuda: this process computes on the only GPU that it sees, that of its bundle.
        binds: NCCL connects at once, for a group without subgroups: those would be split from it and have no gloo.

    Raises:
        RendezvousError: not all ranks joined in time.
    """
    if is_cuda:
        use_expandable_segments()
        torch.cuda.set_device(0)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=torch.device("cuda", 0) if is_cuda and binds else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"{name} did not connect to the other ranks within {timeout_seconds:g} s: {error}"
        ) from error
    logger.info("%s has joined", name)


def local_address(towards: str) -> str:
    """Return the address of this host's interface that routes to another host. Sends nothing."""
    with socket.socket(_family(towards), socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        address: str = probe.getsockname()[0]
        return address


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
