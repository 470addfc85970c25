"""Token buckets: how often each source or job may do something. Pure, except for the clock.

`connections.py`, `requests.py` and `authentication.py` use it. A bucket that is full again is dropped, so the memory is
bounded by the keys that were active recently.
"""

from collections.abc import Callable, Hashable
from time import monotonic

_MIN_KEPT = 1024


class Rates:
    """One bucket per key."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = monotonic) -> None:
        """Allow `burst` at once and `per_second` in the long run, for each key."""
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: dict[Hashable, tuple[float, float]] = {}
        self._drop_at = _MIN_KEPT

    def take(self, key: Hashable) -> bool:
        """Take a token from the key's bucket; return False if the bucket is empty."""
        level = self._level(key)
        if level < 1:
            return False
        self._set(key, level - 1)
        return True

    def refund(self, key: Hashable) -> None:
        """Undo one `take`."""
        self._set(key, min(self._level(key) + 1, self._burst))

    def _level(self, key: Hashable) -> float:
        level, at = self._buckets.get(key, (float(self._burst), 0.0))
        return min(level + (self._clock() - at) * self._per_second, self._burst)

    def _set(self, key: Hashable, level: float) -> None:
        self._buckets[key] = (level, self._clock())
        if len(self._buckets) >= self._drop_at:
            self._buckets = {key: known for key, known in self._buckets.items() if self._level(key) < self._burst}
            self._drop_at = max(_MIN_KEPT, 2 * len(self._buckets))
