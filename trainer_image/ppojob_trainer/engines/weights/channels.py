"""How buckets of bytes get from a trainer's rank to rollout replicas: gloo, NCCL, or memory of a shared GPU.

Called by `sender` and `receiver`, which say what the bytes are. Process groups here exist beside the default one, so a
vLLM worker, which has its own, can join. Every wait has the limit of the link's store, and ends when the link is broken
(`waiting`), except over gloo, which notices a lost connection by itself.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend as Group
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ppojob_trainer.engines.allocator import ordinary_segments
from ppojob_trainer.engines.network import local_address
from ppojob_trainer.engines.transports import CUDA_IPC, GLOO, NcclLog, Transports
from ppojob_trainer.engines.weights.waiting import BrokenLinkError, mark_broken, meet, value_of, wait_until

logger = logging.getLogger(__name__)

GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"
"""Variable with gloo's network interfaces, with commas between them; torch's own groups read it too."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_ABORT_LIMIT_S = 5.0
"""Seconds for closing a link over NCCL before the next one is opened; what lasts longer continues beside it."""


class Channel(Protocol):
    """One sender, rank 0, and receivers from rank 1."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Return memory for `send`: uint8 [num_bytes] of zeros."""
        ...

    def send(self, buffer: Tensor) -> None:
        """Send a buffer to all receivers; it may be changed after this returns."""
        ...

    def receive(self, num_bytes: int) -> Tensor:
        """Return the next buffer, in separate memory."""
        ...

    def skip(self, num_bytes: int) -> None:
        """Take the next buffer and drop it."""
        ...

    def transports(self) -> Transports:
        """Return the transports by which this end sends to others."""
        ...

    def close(self) -> None:
        """End the channel on this side, without waiting for the others; it may be called again."""
        ...

    def break_off(self) -> None:
        """End the channel, and make the other sides fail where they wait."""
        ...


def open_channel(
    backend: str, store: TCPStore, rank: int, size: int, device: torch.device, timeout_seconds: float
) -> Channel:
    """Join the other ranks through `store` and return the channel.

    Raises:
        RuntimeError: not all ranks joined in time, or one was lost meanwhile.
        ValueError: unknown backend.
    """
    timeout = timedelta(seconds=timeout_seconds)
    meet(store, rank, size)
    if backend == "gloo":
        others = {GLOO: size - 1} if rank == 0 else {}
        return _GlooChannel(_gloo(store, rank, size, timeout), store, device, lambda: others)
    if backend == "nccl":
        log = NcclLog()
        return _NcclChannel(_nccl(store, rank, size, timeout, device), store, device, log.take)
    if backend == "cuda_ipc":
        return _SharedMemoryChannel(store, rank, size, device)
    raise ValueError(f"unknown backend {backend!r} for weights: gloo, nccl or cuda_ipc")


class _GroupChannel:
    """Broadcasts from rank 0 of a process group."""

    def __init__(self, group: Any, store: TCPStore, device: torch.device, seen: Callable[[], Transports]) -> None:
        self._group, self._store, self._device = group, store, device
        # The first collective opens the connections; if it fails here, the cause is clearer than in a transfer.
        try:
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device))
        except BaseException:
            self.close()
            raise
        self._transports = seen()

    def transports(self) -> Transports:
        return self._transports

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, buffer: Tensor) -> None:
        self._broadcast(buffer)

    def receive(self, num_bytes: int) -> Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._broadcast(buffer)
        return buffer

    def skip(self, num_bytes: int) -> None:
        self.receive(num_bytes)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._close(group)

    def break_off(self) -> None:
        mark_broken(self._store)
        self.close()

    def _begin(self, buffer: Tensor) -> Any:
        """Begin a broadcast; return torch's object for it."""
        if self._group is None:
            raise BrokenLinkError("this end of the weight link is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([buffer], options)

    def _broadcast(self, buffer: Tensor) -> None:
        raise NotImplementedError

    def _close(self, group: Any) -> None:
        raise NotImplementedError


class _GlooChannel(_GroupChannel):
    """It needs no look at the store: gloo closes its connections when its group is gone, and the other sides fail."""

    def _broadcast(self, buffer: Tensor) -> None:
        # In no variable: an error's frames would keep it, and it keeps the connections open.
        self._begin(buffer).wait()

    def _close(self, group: Any) -> None:
        group.shutdown()


class _NcclChannel(_GroupChannel):
    """It waits itself: torch would end the process at the limit, and wait until then for a side that is gone."""

    def _broadcast(self, buffer: Tensor) -> None:
        work = self._begin(buffer)
        try:
            wait_until(work.is_completed, self._store, "a part of the weights")
            # It raises NCCL's error, if there was one, and makes the current stream wait.
            work.wait()
        except BaseException:
            # The kernel on the GPU still waits for the lost side. Whatever waits for the GPU, as freeing memory does,
            # would wait with it.
            self.close()
            raise

    def _close(self, group: Any) -> None:
        # `shutdown` waits until all sides on this host have called it (ncclCommDestroy); without cuMem host memory, so
        # does `abort` (NVIDIA/nccl#2106). The receivers close their side only when they connect again.
        closing = threading.Thread(target=_abort, args=[group], name="closes-weight-link", daemon=True)
        closing.start()
        closing.join(_ABORT_LIMIT_S)


class _SharedMemoryChannel:
    """Two processes on one GPU: the sender passes a handle of its memory (CUDA IPC), the receiver copies from it."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: torch.device) -> None:
        if size != 2:
            raise ValueError(f"memory of a GPU is shared by one sender and one receiver, not by {size} processes")
        self._store, self._device, self._number = store, device, 0
        self._transports = {CUDA_IPC: 1} if rank == 0 else {}
        mine, theirs = ("sender", "receiver") if rank == 0 else ("receiver", "sender")
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        store.set(f"gpu/{mine}", uuid)
        other = value_of(store, f"gpu/{theirs}").decode()
        if other != uuid:
            raise RuntimeError(f"sender and receiver are on different GPUs, {uuid} and {other}: use nccl")

    def transports(self) -> Transports:
        return self._transports

    def buffer(self, num_bytes: int) -> Tensor:
        with ordinary_segments():
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, buffer: Tensor) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.current_stream(self._device).synchronize()
        handle = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
        self._store.set(f"memory/{self._number}", pickle.dumps(handle).hex())
        # The buffer must stay unchanged until the receiver has copied it.
        value_of(self._store, f"copied/{self._number}")
        self._number += 1

    def receive(self, num_bytes: int) -> Tensor:
        shared = self._shared()
        buffer: Tensor = shared.clone()
        torch.cuda.current_stream(self._device).synchronize()
        del shared
        self._copied()
        assert buffer.numel() == num_bytes, f"the sender's bucket has {buffer.numel()} bytes, wanted {num_bytes}"
        return buffer

    def skip(self, num_bytes: int) -> None:
        # Without a copy, so without memory for it. The sender's memory is free only after it was mapped and released.
        shared = self._shared()
        del shared
        self._copied()

    def _shared(self) -> Tensor:
        """Wait for the next buffer of the sender, and map it."""
        rebuild, arguments = pickle.loads(bytes.fromhex(value_of(self._store, f"memory/{self._number}").decode()))
        shared: Tensor = rebuild(*_on_device(arguments, self._device))
        return shared

    def _copied(self) -> None:
        self._store.set(f"copied/{self._number}", "1")
        self._number += 1

    def close(self) -> None:
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def break_off(self) -> None:
        mark_broken(self._store)
        self.close()


def _on_device(arguments: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Replace the sender's device index by this process's: the same GPU may have a different index in each."""
    place = 6  # `storage_device` of torch's rebuild_cuda_tensor
    return (
        *arguments[:place],
        torch.cuda.current_device() if device.index is None else device.index,
        *arguments[place + 1 :],
    )


def _gloo(store: TCPStore, rank: int, size: int, timeout: timedelta) -> Group:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = _gloo_devices(store.host)
    options._timeout = timeout
    return dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)


def _gloo_devices(towards: str) -> list[Any]:
    """Return where gloo listens. Its default is the address of this host's name in DNS, which may be unreachable."""
    create = dist.ProcessGroupGloo.create_device
    interfaces = os.environ.get(GLOO_INTERFACES)
    if interfaces:
        return [create(interface=interface) for interface in interfaces.split(",")]
    return [create(hostname=local_address(towards))]


def _nccl(store: TCPStore, rank: int, size: int, timeout: timedelta, device: torch.device) -> Group:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _no_watchdog():
        group = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
    group.eager_connect_single_device(device)
    return group


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """Have a group of NCCL raise its errors. Otherwise, torch ends the process from a thread when a transfer fails."""
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


def _abort(group: Any) -> None:
    try:
        group.abort()
    except (dist.DistError, RuntimeError) as error:
        logger.warning("a weight link over NCCL was closed with an error: %s", error)
