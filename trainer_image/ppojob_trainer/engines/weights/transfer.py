"""Weight transfer from the trainer to the rollout engines: the interface, and both its ends.

    FSDP rank 0 ─ gather a tensor (all ranks) ─ pack into a bucket ─ channel ─▶ replica: unpack ─▶ vLLM reloads
          │                                                                        │
          └──────────────── Receipt: checksums ──────── verify ──────── Receipt ───┘

Used by the worker groups (sender) and by vLLM's worker processes (receiver), which find each other through a
`WeightLink`. The receiver works at the same time as the sender, bucket by bucket. It refuses weights of another version
or with other checksums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import RendezvousError, WeightLinkError, WeightSyncError
from ppojob_trainer.engines.network import connect, listen
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.buckets import (
    BUCKET_BYTES,
    Bucket,
    WeightSource,
    buckets_from_text,
    buckets_to_text,
    checksum,
    make_buckets,
)
from ppojob_trainer.engines.weights.channels import Backend, Channel, open_channel


@dataclass(frozen=True)
class Receipt:
    """A record of the weights that one end sent or loaded: equal receipts mean equal weights.

    is_read_back: whether the weights were compared with the engine's own parameters after loading.
    """

    version: int
    num_tensors: int
    num_bytes: int
    checksums: tuple[int, ...]
    is_read_back: bool = field(default=False, compare=False)


def verify(sent: Receipt, received: Sequence[Receipt]) -> None:
    """Compare the weights that the trainer sent with those that each replica loaded.

    Raises:
        WeightSyncError: a replica has other weights; names the replica and the first difference.
    """
    for replica, receipt in enumerate(received):
        if receipt != sent:
            raise WeightSyncError(
                f"rollout replica {replica} has other weights than the trainer: {_difference(sent, receipt)}"
            )


@dataclass(frozen=True)
class WeightLink:
    """Where a sender listens, what it will send, and how. It is passed to the replicas as plain data."""

    backend: str
    address: str
    port: int
    num_receivers: int
    timeout_seconds: float

    def to_wire(self) -> dict[str, Any]:
        """Return a dictionary of plain values."""
        return asdict(self)


@dataclass(frozen=True)
class LinkPlan:
    """Which FSDP rank sends to which vLLM workers, and how. Workers are numbered over all replicas."""

    sender_rank: int
    backend: Backend
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Receivers:
    """The vLLM workers of all replicas of a pool; each receives full tensors and keeps its part of them.

    on_actor: worker i runs on the GPU of FSDP rank i. lost: workers that receive nothing any more, because their engine
    was lost.
    """

    number: int
    on_actor: bool
    lost: frozenset[int] = frozenset()


def link_plans(device: Device, num_ranks: int, receivers: Sequence[Receivers]) -> list[LinkPlan]:
    """Decide which rank sends to which workers; the workers are numbered over all pools, in order.

    If a worker is on a rank's GPU, that rank passes a handle of each gathered tensor's memory (CUDA IPC): NCCL refuses
    two processes on one GPU, and no data crosses GPUs twice. Rank 0 sends to all other workers.
    """
    plans: list[LinkPlan] = []
    apart: list[int] = []
    first = 0
    for pool in receivers:
        numbers = [first + worker for worker in range(pool.number) if worker not in pool.lost]
        if not pool.on_actor or device is Device.CPU:
            apart += numbers
            first += pool.number
            continue
        if pool.number > num_ranks:
            raise ValueError(f"{pool.number} rollout workers cannot share the GPUs of {num_ranks} actor ranks")
        plans += [LinkPlan(number - first, "cuda_ipc", (number,)) for number in numbers]
        first += pool.number
    if apart:
        plans.append(LinkPlan(0, "gloo" if device is Device.CPU else "nccl", tuple(apart)))
    return plans


class WeightSync(Protocol):
    """The trainer's end of a weight transfer."""

    def listen(self) -> list[WeightLink]:
        """Open a rendezvous for each of this rank's plans and return their links; empty if it sends to no worker."""
        ...

    def prepare(self) -> Transports:
        """Wait for the replicas, which connect at the same time. Return the transports from this rank to them."""
        ...

    def push(self, version: int) -> Receipt | None:
        """Send the weights while the replicas receive them. Collective over all FSDP ranks."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class WeightSender:
    """`WeightSync` of one FSDP rank."""

    def __init__(
        self,
        source: WeightSource,
        plans: Sequence[LinkPlan],
        address: str,
        timeout_seconds: float,
        device: torch.device,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Plan a transfer.

        Args:
            plans: those of this rank; empty if it only takes part in gathering.
            address: address of this host that the replicas can reach.
            timeout_seconds: for the rendezvous and for each bucket.
            device: where the tensors are.
        """
        self._source, self._device = source, device
        self._buckets = make_buckets(source.specs(), bucket_bytes)
        self._link_ends = [_LinkEnd(plan, address, timeout_seconds, device) for plan in plans]
        self._num_pushes = 0

    def listen(self) -> list[WeightLink]:
        """See `WeightSync`."""
        return [link_end.listen(buckets_to_text(self._buckets)) for link_end in self._link_ends]

    def prepare(self) -> Transports:
        """See `WeightSync`.

        Raises:
            RendezvousError: not all replicas joined in time.
        """
        found: Counter[str] = Counter()
        for link_end in self._link_ends:
            found.update(link_end.connect())
        return dict(found)

    def push(self, version: int) -> Receipt | None:
        """See `WeightSync`. Returns the receipt of the sent weights, or None from a rank without links.

        Raises:
            WeightLinkError: a replica stopped receiving.
        """
        gathered = self._source.gather()
        if not self._link_ends:
            for _ in gathered:
                pass
            return None
        for link_end in self._link_ends:
            link_end.announce(self._num_pushes, version)
        self._num_pushes += 1
        try:
            checksums = self._send(gathered, version)
        except WeightLinkError:
            # The other ranks gather the remaining tensors, and would wait for this one.
            for _ in gathered:
                pass
            raise
        assert next(gathered, None) is None, "the source yields more tensors than it has specs"
        return _receipt(version, self._buckets, checksums)

    def _send(self, gathered: Iterator[Tensor], version: int) -> list[Tensor]:
        checksums = []
        for bucket in self._buckets:
            buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=self._device)
            for (_, view), tensor in zip(bucket.views(buffer), gathered, strict=False):
                view.copy_(tensor)
            checksums.append(checksum(buffer))
            for link_end in self._link_ends:
                link_end.send(buffer, version)
        return checksums

    def close(self) -> None:
        """See `WeightSync`."""
        for link_end in self._link_ends:
            link_end.close()
        self._link_ends = []


class _LinkEnd:
    """A rank's end of one link."""

    def __init__(self, plan: LinkPlan, address: str, timeout_seconds: float, device: torch.device) -> None:
        self._plan, self._timeout_seconds, self._device = plan, timeout_seconds, device
        self._address = address
        self._store: TCPStore | None = None
        self._channel: Channel | None = None

    def listen(self, buckets: str) -> WeightLink:
        """Open the rendezvous store and write the layout of the buckets into it."""
        self._store = listen(self._address, self._timeout_seconds)
        self._store.set("buckets", buckets)
        num_receivers = len(self._plan.receivers)
        return WeightLink(self._plan.backend, self._address, self._store.port, num_receivers, self._timeout_seconds)

    def connect(self) -> Transports:
        """Wait for the receivers.

        Raises:
            RendezvousError: not all receivers joined in time.
        """
        assert self._store is not None, "listen() comes first"
        size = 1 + len(self._plan.receivers)
        try:
            self._channel = open_channel(self._plan.backend, self._store, 0, size, self._device, self._timeout_seconds)
        except (dist.DistError, RuntimeError) as error:
            raise RendezvousError(
                f"the rollout workers {list(self._plan.receivers)} did not all connect for weights at "
                f"{self._address}:{self._store.port} within {self._timeout_seconds:g} s: {error}"
            ) from error
        return self._channel.transports()

    def announce(self, number: int, version: int) -> None:
        """Announce to the receivers which version is sent next."""
        assert self._store is not None, "listen() comes first"
        self._store.set(_announcement(number), str(version))

    def send(self, buffer: Tensor, version: int) -> None:
        """Send a bucket.

        Raises:
            WeightLinkError: a receiver stopped receiving.
        """
        assert self._channel is not None, "connect() comes first"
        try:
            self._channel.send(buffer)
        except (dist.DistError, RuntimeError) as error:
            raise WeightLinkError(
                f"a rollout replica stopped receiving version {version} of the weights: {error}"
            ) from error

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._store = None


class WeightReceiver:
    """A replica's end of a weight transfer; vLLM's worker holds one."""

    def __init__(self, link: WeightLink, rank: int, device: torch.device) -> None:
        """Connect; the sender prepares at the same time.

        Args:
            rank: this receiver's number among all receivers of the link, from 1.

        Raises:
            RendezvousError: the sender or another replica did not join in time.
        """
        self._link, self._num_receipts = link, 0
        try:
            self._store = connect(link.address, link.port, link.timeout_seconds)
            self._channel = open_channel(
                link.backend, self._store, rank, 1 + link.num_receivers, device, link.timeout_seconds
            )
        except (RendezvousError, dist.DistError, RuntimeError) as error:
            raise RendezvousError(
                f"rollout receiver {rank} of {link.num_receivers} did not reach the trainer's rank at "
                f"{link.address}:{link.port} within {link.timeout_seconds:g} s: {error}"
            ) from error
        self._buckets = buckets_from_text(self._store.get("buckets"))

    def transports(self) -> Transports:
        """Return the transports by which this receiver passes weights on to others."""
        return self._channel.transports()

    def begin(self, version: int) -> WeightStream:
        """Return the tensors of the next push.

        Raises:
            WeightSyncError: the push has another version.
            WeightLinkError: the sender did not start in time.
        """
        key = _announcement(self._num_receipts)
        try:
            announced = int(self._store.get(key))
        except (dist.DistError, RuntimeError) as error:
            raise WeightLinkError(
                f"the trainer did not begin to send version {version} within {self._link.timeout_seconds:g} s"
            ) from error
        self._num_receipts += 1
        if announced != version:
            raise WeightSyncError(f"the trainer sends version {announced} of the weights, wanted was {version}")
        return WeightStream(version, self._buckets, self._channel)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class WeightStream:
    """Iterates once over (name, tensor); afterwards `receipt` has the record of them."""

    def __init__(self, version: int, buckets: Sequence[Bucket], channel: Channel) -> None:
        self._version, self._buckets, self._channel = version, buckets, channel
        self._checksums: list[Tensor] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._buckets:
            buffer = self._channel.receive(bucket.num_bytes)
            self._checksums.append(checksum(buffer))
            yield from bucket.views(buffer)

    def receipt(self) -> Receipt:
        """Return the receipt.

        Raises:
            WeightSyncError: the reader stopped before the last bucket.
        """
        if len(self._checksums) != len(self._buckets):
            raise WeightSyncError(
                f"only {len(self._checksums)} of {len(self._buckets)} buckets of version {self._version} were loaded"
            )
        return _receipt(self._version, self._buckets, self._checksums)


def _receipt(version: int, buckets: Sequence[Bucket], checksums: Sequence[Tensor]) -> Receipt:
    num_tensors = sum(len(bucket.specs) for bucket in buckets)
    num_bytes = sum(spec.num_bytes for bucket in buckets for spec in bucket.specs)
    return Receipt(version, num_tensors, num_bytes, tuple(torch.stack(list(checksums)).tolist()))


def _difference(sent: Receipt, received: Receipt) -> str:
    if (sent.version, sent.num_tensors) != (received.version, received.num_tensors):
        return (
            f"version {received.version} with {received.num_tensors} tensors, "
            f"sent was version {sent.version} with {sent.num_tensors}"
        )
    pairs = enumerate(zip(sent.checksums, received.checksums, strict=False))
    first = next((index for index, (mine, theirs) in pairs if mine != theirs), None)
    return f"version {sent.version} differs in bucket {first} of {len(sent.checksums)}"


def _announcement(number: int) -> str:
    return f"push/{number}"
