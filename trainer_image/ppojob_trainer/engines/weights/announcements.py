"""What both ends of a weight link write into its store, beside the bytes that go over its channel.

    sender      buckets, announcement 0 ─ push 0 ─               other buckets, announcement 1 ─ push 1 ─ ...
    receivers                                     boxes of each ─

Called by `sender` and `receiver`. Over a divided link, push 0 has whole tensors; the receivers find out which boxes of
them their loaders read, and ask for those. From push 1 on only they are sent. A partial push leaves out the tensors
that training never changes; push 0 is never partial. Each kind of push has its own layout of buckets, which is written
before the first push of that kind is announced.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

COMPARED_EVERY: Final = 10
"""Every tenth push over a link is compared, and so is the first one of each kind (whole tensors or boxes, partial or
not) and each complete one after a partial one."""


@dataclass(frozen=True)
class Announcement:
    """What the sender says of a push before it begins.

    is_compared: the receivers check more than checksums. is_divided: only the boxes that they asked for are sent.
    is_partial: tensors that training never changes are not sent.
    """

    version: int
    is_compared: bool
    is_divided: bool
    is_partial: bool = False

    def to_text(self) -> str:
        """Return JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes) -> Announcement:
        """Undo `to_text`."""
        return cls(**json.loads(text))

    @property
    def buckets_key(self) -> str:
        """The store's key of the layout of the push's buckets."""
        return buckets_key(is_divided=self.is_divided, is_partial=self.is_partial)

    @property
    def has_sums(self) -> bool:
        """Whether each bucket is followed by the sums of its whole tensors."""
        return self.is_compared and self.is_divided


def buckets_key(*, is_divided: bool, is_partial: bool) -> str:
    """Return the store's key of the layout of the buckets of a kind of push."""
    return f"buckets/{'boxes' if is_divided else 'whole'}/{'changing' if is_partial else 'all'}"


def announcement_key(number: int) -> str:
    """Return the store's key of a push's announcement."""
    return f"push/{number}"


def boxes_key(rank: int) -> str:
    """Return the store's key of the boxes that a receiver asks for."""
    return f"boxes/{rank}"
