"""What happens to the prefix cache and to unfinished responses when the weights change between two steps of vLLM.

    tokens of a response    t0 t1 t2 │ t3 t4 t5 t6 │ t7
    version of the weights        4  │      5      │  6      update 5 found 3 tokens, update 6 found 7

A response continues with the new weights and keeps its key-value cache, which older weights computed. The cache of an
unfinished response is its own from then on: no other request may find a block of it. `ResponseScheduler` calls
`forget_blocks`, and counts the tokens; `RolloutEngine` turns the counts into versions.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from ppojob_trainer.engines.errors import RolloutError

TOKENS_AT_UPDATES: Final = "ppojob_tokens_at_updates"
"""Key in vLLM's `kv_transfer_params` of a complete response; a dictionary that passes from the scheduler to the owner
unchanged. No other field of vLLM's messages does."""

_ALL: Final = sys.maxsize
_POLL_S: Final = 0.05


async def clear_cache(reset: Callable[[], Awaitable[bool]], limit_s: float = 30.0) -> None:
    """Clear the prefix cache, whose blocks older weights computed.

    vLLM changes nothing, and only says so in its log, while a request has a block; one that was just aborted may.

    Args:
        reset: vLLM's reset; it returns whether the cache is empty.

    Raises:
        RolloutError: the cache was not cleared in time.
    """
    end = time.monotonic() + limit_s
    while not await reset():
        if time.monotonic() >= end:
            raise RolloutError(
                f"vLLM has not cleared its prefix cache for {limit_s:g} s, because requests still have blocks of it: "
                "responses would be computed from the results of older weights"
            )
        await asyncio.sleep(_POLL_S)


def forget_blocks(cache: Any, unfinished: Iterable[str]) -> None:
    """Remove all blocks from the prefix cache, and those that unfinished requests add later.

    vLLM's own reset refuses while a request has blocks, or makes it compute its cache again. A later block of an
    unfinished request is computed by new weights from the cache of old ones, so it must not serve another request
    either: vLLM adds only blocks above a request's count of cached ones, so the count is set to the largest number. A
    request that vLLM preempts loses its count with its blocks; all its blocks are computed by new weights then.

    Args:
        cache: vLLM's KVCacheManager.
        unfinished: ids of the requests that have blocks.
    """
    cache.evict_blocks(set(range(len(cache.block_pool.blocks))))
    names = list(unfinished)
    for manager in cache.coordinator.single_type_managers:
        manager.num_cached_block |= dict.fromkeys(names, _ALL)


def versions_of_tokens(num_tokens: int, tokens_at_updates: Sequence[int], versions: Sequence[int]) -> list[int]:
    """Return the version of the weights that sampled each token of a response.

    Args:
        tokens_at_updates: tokens that the response had at each update of the weights between its request and its end.
        versions: of the weights that the engine had, up to those that sampled the last token.
    """
    found: list[int] = []
    first = len(versions) - 1 - len(tokens_at_updates)
    for version, (start, end) in zip(versions[first:], pairwise([0, *tokens_at_updates, num_tokens]), strict=True):
        found += [version] * (end - start)
    return found
