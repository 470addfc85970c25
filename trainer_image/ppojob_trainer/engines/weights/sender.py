"""The trainer's end of a weight transfer.

    FSDP rank ─ gather a tensor (all ranks) ─ pack into a bucket ─ channel ─▶ replica: unpack ─▶ vLLM reloads
          │                                                                        │
          └──────────────── Receipt: checksums ──────── verify ──────── Receipt ───┘

Used by the actor's processes. The receiver finds it through a `WeightLink`, and works at the same time, bucket by
bucket. When a push of boxes is compared, each bucket is followed by the sums of its whole tensors (`sums`), which show
whether a box is the right one. A partial push leaves out the tensors that the source calls frozen. The caller requests
it, because only the caller knows that all engines have these tensors; the receivers refuse one that they cannot use.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from ppojob_trainer.engines.errors import RendezvousError, WeightLinkError
from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.announcements import (
    COMPARED_EVERY,
    Announcement,
    announcement_key,
    boxes_key,
    buckets_key,
)
from ppojob_trainer.engines.weights.buckets import (
    BUCKET_BYTES,
    Bucket,
    PartlyFrozenSource,
    TensorSpec,
    WeightSource,
    boxes_from_json,
    buckets_to_text,
    checksum,
    make_buckets,
)
from ppojob_trainer.engines.weights.channels import Channel, open_channel
from ppojob_trainer.engines.weights.plans import LinkPlan, WeightLink
from ppojob_trainer.engines.weights.receipts import Receipt, receipt_of
from ppojob_trainer.engines.weights.sums import sums_of
from ppojob_trainer.engines.weights.waiting import value_of

logger = logging.getLogger(__name__)


class WeightSync(Protocol):
    """The trainer's end of a weight transfer."""

    def listen(self) -> list[WeightLink]:
        """Open a rendezvous for each of this rank's plans and return their links; empty if it sends to no worker."""
        ...

    def prepare(self) -> Transports:
        """Wait for the replicas, which connect at the same time. Return the transports from this rank to them."""
        ...

    def push(self, version: int, *, is_partial: bool = False) -> list[Receipt]:
        """Send the weights while the replicas receive them. Collective over all FSDP ranks.

        Args:
            is_partial: leave out what training never changes: all replicas have it from an earlier push over these
                links. It has no effect if training changes everything.
        """
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
            bucket_bytes: of all links together.
        """
        self._source = source
        specs, each = source.specs(), bucket_bytes // max(1, len(plans))
        self._has_frozen = any(spec.is_frozen for spec in specs)
        self._link_ends = [_LinkEnd(plan, specs, each, address, timeout_seconds, device) for plan in plans]

    def listen(self) -> list[WeightLink]:
        """See `WeightSync`."""
        return [link_end.listen() for link_end in self._link_ends]

    def prepare(self) -> Transports:
        """See `WeightSync`.

        Raises:
            RendezvousError: not all replicas joined in time.
        """
        found: Counter[str] = Counter()
        for link_end in self._link_ends:
            found.update(link_end.connect())
        return dict(found)

    def push(self, version: int, *, is_partial: bool = False) -> list[Receipt]:
        """See `WeightSync`. Returns the receipts of the sent weights, one for each plan.

        Raises:
            WeightLinkError: a replica stopped receiving.
        """
        gathered = self._source.gather()
        if is_partial := is_partial and self._has_frozen:
            assert isinstance(self._source, PartlyFrozenSource), "a source with frozen tensors can leave them out"
            gathered = self._source.gather_changing()
        try:
            for link_end in self._link_ends:
                link_end.begin(version, is_partial=is_partial)
            for tensor in gathered:
                for link_end in self._link_ends:
                    link_end.send(tensor)
        except WeightLinkError:
            # The other receivers would wait. The next push connects again.
            for link_end in self._link_ends:
                link_end.close()
            # The other ranks gather the remaining tensors, and would wait for this one.
            for _ in gathered:
                pass
            raise
        return [link_end.receipt() for link_end in self._link_ends]

    def close(self) -> None:
        """See `WeightSync`."""
        for link_end in self._link_ends:
            link_end.close()
        self._link_ends = []


class _LinkEnd:
    """A rank's end of one link. `begin`, `send` for each tensor and `receipt` are a push."""

    def __init__(
        self,
        plan: LinkPlan,
        specs: Sequence[TensorSpec],
        bucket_bytes: int,
        address: str,
        timeout_seconds: float,
        device: torch.device,
    ) -> None:
        self._plan, self._timeout_seconds, self._device = plan, timeout_seconds, device
        self._specs, self._bucket_bytes = specs, bucket_bytes
        self._layouts: dict[str, list[Bucket]] = {}
        self._buckets: list[Bucket] = []
        self._address = address
        self._store: TCPStore | None = None
        self._channel: Channel | None = None
        self._num_pushes, self._is_divided, self._was_partial = 0, False, False
        self._sending: _Sending | None = None

    def listen(self) -> WeightLink:
        """Open the rendezvous store and write the layout of the first push's buckets into it."""
        self._store = listen(self._address, self._timeout_seconds)
        self._lay_out(self._store, buckets_key(is_divided=False, is_partial=False), self._specs)
        num_receivers = len(self._plan.receivers)
        return WeightLink(
            self._plan.backend,
            self._address,
            self._store.port,
            num_receivers,
            self._timeout_seconds,
            self._plan.part is not None,
        )

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

    def begin(self, version: int, *, is_partial: bool) -> None:
        """Announce to the receivers which version is sent next, and how.

        Raises:
            WeightLinkError: the receivers of a divided link did not ask for their boxes.
        """
        assert self._store is not None, "listen() comes first"
        assert self._channel is not None, "connect() comes first"
        number = self._num_pushes
        assert number > 0 or not is_partial, "the first push over a link has all tensors"
        if number == 1 and self._plan.part is not None:
            self._divide(self._store)
        key = buckets_key(is_divided=self._is_divided, is_partial=is_partial)
        is_new = key not in self._layouts or (self._was_partial and not is_partial)
        is_compared, self._was_partial = is_new or number % COMPARED_EVERY == 0, is_partial
        self._lay_out(self._store, key, [spec for spec in self._specs if not (is_partial and spec.is_frozen)])
        announcement = Announcement(version, is_compared, self._is_divided, is_partial)
        self._store.set(announcement_key(number), announcement.to_text())
        self._num_pushes += 1
        self._sending = _Sending(announcement, self._buckets, self._channel)

    def _lay_out(self, store: TCPStore, key: str, specs: Sequence[TensorSpec]) -> None:
        """Use the buckets of a kind of push from now on; the first time, write them into the store."""
        if key not in self._layouts:
            self._layouts[key] = make_buckets(specs, self._bucket_bytes)
            store.set(key, buckets_to_text(self._layouts[key]))
        self._buckets = self._layouts[key]

    def _divide(self, store: TCPStore) -> None:
        """Take over the boxes that the receivers asked for, if they are the same for all."""
        try:
            wanted = {value_of(store, boxes_key(rank)) for rank in range(1, 1 + len(self._plan.receivers))}
        except (dist.DistError, RuntimeError) as error:
            raise WeightLinkError(
                f"not all rollout workers {list(self._plan.receivers)} asked for their part of the weights within "
                f"{self._timeout_seconds:g} s: {error}"
            ) from error
        if len(wanted) > 1:
            logger.warning(
                "rollout workers %s need different parts of the weights: they get whole tensors", self._plan.receivers
            )
            return
        boxes = json.loads(wanted.pop())
        self._specs = [replace(spec, boxes=boxes_from_json(boxes[spec.name])) for spec in self._specs]
        self._is_divided = True

    def send(self, tensor: Tensor) -> None:
        """Send the next tensor, when its bucket is full.

        Raises:
            WeightLinkError: a receiver stopped receiving.
        """
        assert self._sending is not None, "begin() comes first"
        self._sending.add(tensor)

    def receipt(self) -> Receipt:
        """Return the receipt of the push."""
        assert self._sending is not None, "begin() comes first"
        return self._sending.receipt()

    def close(self) -> None:
        """Close the connection; receivers that wait for this side fail."""
        if self._channel is not None:
            self._channel.break_off()
        # Those that wait at the store fail when it is gone.
        self._channel = self._store = self._sending = None


class _Sending:
    """One push over a link: fills a bucket tensor by tensor, and sends it when it is full."""

    def __init__(self, announcement: Announcement, buckets: Sequence[Bucket], channel: Channel) -> None:
        self._announcement, self._buckets, self._channel = announcement, buckets, channel
        self._places = ((bucket, index) for bucket in buckets for index in range(len(bucket.specs)))
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._sums: list[Tensor] = []
        self._checksums: list[Tensor] = []

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._announcement.version

    def add(self, tensor: Tensor) -> None:
        """Pack the next tensor, which is whole, and send its bucket when that is full.

        Raises:
            WeightLinkError: a receiver stopped receiving.
        """
        place = next(self._places, None)
        assert place is not None, "the source yields more tensors than it has specs"
        bucket, index = place
        if index == 0:
            self._buffer = self._channel.buffer(bucket.num_bytes)
            self._sums = []
        bucket.pack(self._buffer, index, tensor)
        if self._announcement.has_sums and bucket.num_sums[index]:
            self._sums.append(sums_of(tensor))
        if index < len(bucket.specs) - 1:
            return
        self._checksums.append(checksum(self._buffer))
        self._send(self._buffer)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if self._sums:
            sums = torch.cat(self._sums).view(torch.uint8)
            self._send(self._channel.buffer(sums.numel()).copy_(sums))

    def _send(self, buffer: Tensor) -> None:
        """Send a buffer. Other failures than the connection's, such as packing without memory, are the actor's own."""
        try:
            self._channel.send(buffer)
        except torch.OutOfMemoryError:
            raise
        except (dist.DistError, RuntimeError) as error:
            raise WeightLinkError(
                f"a rollout replica stopped receiving version {self.version} of the weights: {error}"
            ) from error

    def receipt(self) -> Receipt:
        """Return the receipt; all tensors must have come."""
        assert len(self._checksums) == len(self._buckets), "the source yields fewer tensors than it has specs"
        return receipt_of(self.version, self._buckets, self._checksums)
