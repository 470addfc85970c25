"""Which connection is closed if there are too many. Pure: it knows addresses, and no sockets.

    accepted ──open()──▶ waiting ──protect()──▶ protected ──closed()──▶
                            │
                            └── dropped: too slow, or the oldest of a source with too many

A connection waits until its sender is known (`endpoint.py` says when). Only waiting connections are dropped, the oldest
first: a good request needs milliseconds and a slow one is always older. So new connections get in while slow ones are
open, even from the same source.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ppojob_operator.status_server.limits.rates import Rates

Address = tuple[Any, ...]
"""Address of the other side as a socket has it: the host comes first."""
Close = Callable[[], object]
"""Closes the connection at once."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one port. A source is an IP address."""

    total: int = 512
    """Open connections."""
    per_source: int = 64
    """Open connections of one source."""
    per_second: int = 200
    """New connections of one source in a second, in the long run; a TLS handshake takes 0.7 ms of a core."""
    burst: int = 400
    """New connections of one source at once."""
    seconds: float = 10.0
    """Longest time from the connection until its sender is known: handshake, headers and authentication."""


class Connections:
    """The open connections of one port."""

    def __init__(
        self, limits: ConnectionLimits, count: Callable[[str], None], clock: Callable[[], float] = monotonic
    ) -> None:
        """`count` is called with the reason for each connection that is closed by a limit."""
        self.seconds = limits.seconds
        self._limits = limits
        self._count = count
        self._rates = Rates(limits.per_second, limits.burst, clock)
        self._waiting: dict[str, dict[Address, Close]] = {}
        self._protected: set[Address] = set()
        self._of_source: Counter[str] = Counter()

    def open(self, address: Address, close: Close) -> bool:
        """Add a new connection; False if it must be closed instead. May close another one."""
        source = address[0]
        if not self._rates.take(source):
            self._count("SourceRate")
            return False
        self._waiting.setdefault(source, {})[address] = close
        self._of_source[source] += 1
        if self._of_source[source] > self._limits.per_source:
            return self._drop_oldest(source, "SourceLimit") != address
        if self._of_source.total() > self._limits.total:
            largest = max(self._waiting, key=lambda source: len(self._waiting[source]))
            return self._drop_oldest(largest, "TotalLimit") != address
        return True

    def protect(self, address: Address) -> None:
        """Keep the connection from now on: its sender is known, and other limits bound the rest of its request."""
        if self._leave(address):
            self._protected.add(address)

    def expire(self, address: Address) -> None:
        """Close the connection if its sender is still unknown: its time is over."""
        close = self._waiting.get(address[0], {}).get(address)
        if close is not None:
            self._drop(address, close, "TooSlow")

    def closed(self, address: Address) -> None:
        """Remove a connection that has ended; one that was dropped is removed already."""
        if address in self._protected:
            self._protected.remove(address)
        elif not self._leave(address):
            return
        self._of_source[address[0]] -= 1
        if not self._of_source[address[0]]:
            del self._of_source[address[0]]

    def _leave(self, address: Address) -> bool:
        """Remove a waiting connection from those that wait; False if it is none."""
        waiting = self._waiting.get(address[0], {})
        if waiting.pop(address, None) is None:
            return False
        if not waiting:
            del self._waiting[address[0]]
        return True

    def _drop_oldest(self, source: str, reason: str) -> Address:
        address, close = next(iter(self._waiting[source].items()))
        self._drop(address, close, reason)
        return address

    def _drop(self, address: Address, close: Close, reason: str) -> None:
        self.closed(address)
        self._count(reason)
        close()
