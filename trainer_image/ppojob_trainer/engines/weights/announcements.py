"""What both ends of a weight link write into its store, beside the bytes that go over its channel.

    sender      BUCKETS, announcement 0 ─ push 0 ─               DIVIDED_BUCKETS, announcement 1 ─ push 1 ─ ...
    receivers                                     boxes of each ─

Called by `sender` and `receiver`. Over a divided link, push 0 has whole tensors; the receivers find out which boxes of
them their loaders read, and ask for those. From push 1 on only they are sent.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

BUCKETS: Final = "buckets"
DIVIDED_BUCKETS: Final = "buckets/divided"
COMPARED_EVERY: Final = 10
"""Every tenth push over a link is compared, and so is the first one; over a divided link, also the first with boxes."""


@dataclass(frozen=True)
class Announcement:
    """What the sender says of a push before it begins.

    is_compared: the receivers check more than checksums. is_divided: only the boxes that they asked for are sent.
    """

    version: int
    is_compared: bool
    is_divided: bool

    def to_text(self) -> str:
        """Return JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes) -> Announcement:
        """Undo `to_text`."""
        return cls(**json.loads(text))

    @property
    def has_sums(self) -> bool:
        """Whether each bucket is followed by the sums of its whole tensors."""
        return self.is_compared and self.is_divided


def announcement_key(number: int) -> str:
    """Return the store's key of a push's announcement."""
    return f"push/{number}"


def boxes_key(rank: int) -> str:
    """Return the store's key of the boxes that a receiver asks for."""
    return f"boxes/{rank}"
