"""How the ends of a weight link wait for each other, and learn that one of them is gone.

gloo fails at once when a connection closes. NCCL on one host and shared memory of a GPU would wait until the limit of
the link. Therefore each end also looks at the link's store while it waits: `break_off` marks the link there, as does an
end that closes. Called by the channels, the ends of a link, and the worker group that sees a receiver end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ppojob_trainer.engines.errors import RendezvousError
from ppojob_trainer.engines.network import connect
from ppojob_trainer.engines.weights.plans import WeightLink

logger = logging.getLogger(__name__)

_BROKEN = "broken"
_LOOK_EVERY_S = 0.5
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-5, 1e-2
_CONNECT_LIMIT_S = 5.0


class BrokenLinkError(RuntimeError):
    """Another end of the link was closed or lost, or did not answer in time."""


def break_off(link: WeightLink) -> None:
    """Make all ends of a link fail where they wait for each other. If its sender is gone, they fail by themselves."""
    try:
        store = connect(link.address, link.port, _CONNECT_LIMIT_S)
    except RendezvousError as error:
        logger.info("no weight link is open any more at %s:%d: %s", link.address, link.port, error)
    else:
        mark_broken(store)


def mark_broken(store: TCPStore) -> None:
    """Make the other ends of a link fail where they wait; without the sender, it does nothing."""
    try:
        store.set(_BROKEN, "1")
    except (dist.DistError, RuntimeError) as error:
        logger.debug("the store of the weight link is gone: %s", error)


def value_of(store: TCPStore, key: str) -> bytes:
    """Return the value that another end writes into the store; raises the errors of `wait_until`.

    torch's own wait cannot be interrupted, and logs two warnings when a short limit passes.
    """
    wait_until(lambda: bool(store.check([key])), store, key)
    return bytes(store.get(key))


def meet(store: TCPStore, rank: int, size: int) -> None:
    """Wait until all ends of a link are there.

    NCCL waits without a limit for a process that ended before it connected.

    It raises the errors of `wait_until`.
    """
    store.set(f"here/{rank}", "1")
    for other in range(size):
        value_of(store, f"here/{other}")


def wait_until(is_done: Callable[[], bool], store: TCPStore, what: str) -> None:
    """Wait for a transfer or a value.

    Raises:
        BrokenLinkError: the link is broken, or the wait has lasted longer than the store's limit.
        DistError: the sender is gone (torch's error).
    """
    started = time.monotonic()
    limit_s = store.timeout.total_seconds()  # type: ignore[attr-defined]
    looked = started
    while not is_done():
        now = time.monotonic()
        if now - looked > _LOOK_EVERY_S:
            looked = now
            if store.check([_BROKEN]):
                raise BrokenLinkError("another end of the weight link was closed or lost")
        if now - started > limit_s:
            raise BrokenLinkError(f"{what} did not come within {limit_s:g} s")
        # Short waits are the rule, so a wait gets at most a twentieth longer by its pauses.
        time.sleep(min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S + (now - started) / 20))
