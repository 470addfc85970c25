"""The end of a weight transfer in vLLM's worker processes; `sender` is the other one.

Used by the worker extension. It refuses weights of another version, boxes that are not those of the trainer's weights,
boxes that do not suffice any more, and a partial push to an engine that does not have all other tensors.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from ppojob_trainer.engines.errors import RendezvousError, WeightLinkError, WeightSyncError
from ppojob_trainer.engines.network import connect
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.announcements import (
    Announcement,
    announcement_key,
    boxes_key,
)
from ppojob_trainer.engines.weights.boxes import Box
from ppojob_trainer.engines.weights.buckets import Bucket, buckets_from_text, checksum
from ppojob_trainer.engines.weights.channels import Channel, open_channel
from ppojob_trainer.engines.weights.plans import WeightLink
from ppojob_trainer.engines.weights.receipts import Receipt, receipt_of
from ppojob_trainer.engines.weights.sums import agree
from ppojob_trainer.engines.weights.waiting import value_of

logger = logging.getLogger(__name__)


class WeightReceiver:
    """A replica's end of a weight transfer; vLLM's worker holds one."""

    def __init__(self, link: WeightLink, rank: int, device: torch.device) -> None:
        """Connect; the sender prepares at the same time.

        Args:
            rank: this receiver's number among all receivers of the link, from 1.

        Raises:
            RendezvousError: the sender or another replica did not join in time.
        """
        self._link, self._rank, self._num_receipts = link, rank, 0
        self._asked: Mapping[str, tuple[Box, ...]] | None = None
        self._layouts: dict[str, list[Bucket]] = {}
        self._last: WeightStream | None = None
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

    def transports(self) -> Transports:
        """Return the transports by which this receiver passes weights on to others."""
        return self._channel.transports()

    def begin(self, version: int, *, keeps_weights: bool = True) -> WeightStream:
        """Return the tensors of the next push.

        Args:
            keeps_weights: the engine still has what it loaded last, so a partial push is enough.

        Raises:
            WeightSyncError: the push has another version, or is partial and the engine needs all tensors.
            WeightLinkError: the sender did not start in time.
        """
        key = announcement_key(self._num_receipts)
        try:
            announced = Announcement.from_text(value_of(self._store, key))
        except (dist.DistError, RuntimeError) as error:
            raise WeightLinkError(f"the trainer did not begin to send version {version}: {error}") from error
        self._num_receipts += 1
        key = announced.buckets_key
        if key not in self._layouts:
            self._layouts[key] = buckets_from_text(self._store.get(key))
        stream = WeightStream(announced, self._layouts[key], self._channel)
        # All others were loaded through this receiver: the first push is never partial.
        has_others = keeps_weights and self._last is not None and self._last.is_loaded
        self._last = stream
        if announced.version != version:
            stream.drain()
            raise WeightSyncError(f"the trainer sends version {announced.version} of the weights, wanted was {version}")
        if announced.is_partial and not has_others:
            stream.drain()
            raise WeightSyncError(
                f"version {version} of the weights has only the tensors that training changes, and this engine does "
                "not have the others: it was reconnected, its last push failed, or it released its weights"
            )
        return stream

    def ask_for(self, boxes: Mapping[str, tuple[Box, ...]]) -> None:
        """Ask for boxes of the weights, those that the loaders read; over a divided link, later pushes have only them.

        Args:
            boxes: of each weight, without overlap, in order.

        Raises:
            WeightSyncError: the loaders read other boxes than in the first push. Of boxes, those were not sent; of a
                partial push, some weights may have been skipped.
        """
        if self._asked is None:
            self._asked = boxes
            if self._link.is_divided:
                self._store.set(boxes_key(self._rank), json.dumps(boxes, sort_keys=True))
            return
        assert self._last is not None, "a push comes first"
        # A partial push has some of them.
        others = [name for name in boxes if boxes[name] != self._asked.get(name)]
        if others and (self._last.is_divided or self._last.is_partial):
            raise WeightSyncError(
                f"vLLM's loader reads other parts of the weights than before: {boxes[others[0]]} of {others[0]}, and "
                f"{self._asked.get(others[0])} before; report this with the model's config.json"
            )

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


class WeightStream:
    """Iterates once over (name, whole tensor); afterwards `receipt` has the record of them.

    A reader that stops early calls `drain`: the sender would wait for this receiver, and with it all others.
    is_compared: the reader should compare its parameters with the weights after loading. is_divided: only boxes of the
    tensors come. is_partial: tensors that training never changes do not come. is_loaded: `receipt` has been returned.
    """

    def __init__(self, announced: Announcement, buckets: Sequence[Bucket], channel: Channel) -> None:
        self._announced, self._buckets, self._channel = announced, buckets, channel
        self._unread: Iterator[int] = _messages(announced, buckets)
        self._checksums: list[Tensor] = []
        self._agreeing: dict[str, Tensor] = {}
        self.is_compared = announced.is_compared
        self.is_divided, self.is_partial = announced.is_divided, announced.is_partial
        self.is_loaded = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._buckets:
            buffer = self._receive()
            self._checksums.append(checksum(buffer))
            if self._announced.has_sums and any(bucket.num_sums):
                self._compare(bucket, buffer)
            yield from bucket.tensors(buffer)

    def drain(self, error: BaseException | None = None) -> None:
        """Take what is left of the push, and drop it. Nothing is left after a failure of the connection.

        If there is no memory for a bucket, the link is broken off: the sender fails, and the other receivers with it.

        Args:
            error: why the reader stopped; what its frames hold, such as tensors of a bucket, is released.
        """
        _release_frames(error)
        if torch.cuda.is_available():
            # The reader may have stopped because there was no memory for the next bucket.
            torch.cuda.empty_cache()
        try:
            for num_bytes in self._unread:
                self._channel.skip(num_bytes)
        except (dist.DistError, RuntimeError) as failure:
            logger.warning("the rest of version %d of the weights did not come: %s", self._announced.version, failure)
            if isinstance(failure, torch.OutOfMemoryError):
                self._channel.break_off()

    def _receive(self) -> Tensor:
        num_bytes = next(self._unread)
        try:
            return self._channel.receive(num_bytes)
        except torch.OutOfMemoryError:
            # Channels allocate before they take anything, so the message is still to come.
            self._unread = chain([num_bytes], self._unread)
            raise
        except (dist.DistError, RuntimeError):
            self._unread = iter(())
            raise

    def _compare(self, bucket: Bucket, buffer: Tensor) -> None:
        """Receive the sums of the bucket's whole tensors, and compare them with its boxes."""
        sums = torch.split(self._receive().view(torch.int64), list(bucket.num_sums))
        for index, (spec, of_whole) in enumerate(zip(bucket.specs, sums, strict=True)):
            for box, part in bucket.parts(buffer, index):
                agrees = agree(part, box, spec.shape, of_whole)
                if agrees is None:
                    logger.warning(
                        "%s of %s is not compared with the trainer's: it has no whole rows or columns", box, spec.name
                    )
                else:
                    self._agreeing[f"{box} of {spec.name}"] = agrees

    def receipt(self) -> Receipt:
        """Return the receipt.

        Raises:
            WeightSyncError: the reader stopped before the last bucket, or a box is not that of the trainer's weights.
        """
        version = self._announced.version
        if len(self._checksums) != len(self._buckets):
            raise WeightSyncError(
                f"only {len(self._checksums)} of {len(self._buckets)} buckets of version {version} were loaded"
            )
        agreeing = torch.stack(list(self._agreeing.values())).tolist() if self._agreeing else []
        wrong = [name for name, agrees in zip(self._agreeing, agreeing, strict=True) if not agrees]
        if wrong:
            raise WeightSyncError(
                f"{len(wrong)} of {len(agreeing)} parts of version {version} are not those of the trainer's weights, "
                f"such as {wrong[0]}"
            )
        found = receipt_of(version, self._buckets, self._checksums)
        self.is_loaded = True
        return found


def _messages(announced: Announcement, buckets: Sequence[Bucket]) -> Iterator[int]:
    """Yield the bytes of each message of a push: a bucket, and the sums of its whole tensors if it has any."""
    for bucket in buckets:
        yield bucket.num_bytes
        if announced.has_sums and (number := sum(bucket.num_sums)):
            yield number * torch.int64.itemsize


def _release_frames(error: BaseException | None) -> None:
    """Clear the local variables of an error's frames, also of the errors that it came from; the traceback stays."""
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]
