"""What happens to unfinished responses when the weights change between two steps of vLLM.

    tokens of a response    t0 t1 t2 │ t3 t4 t5 t6 │ t7
    version of the weights        4  │      5      │  6      update 5 found 3 tokens, update 6 found 7

A response continues with the new weights and keeps its key-value cache, which older weights computed. The cache of an
unfinished response is its own from then on: no other request may find a block of it. `ResponseScheduler` calls
`forget_blocks`, and counts the tokens; `RolloutEngine` turns the counts into versions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

TOKENS_AT_UPDATES: Final = "ppojob_tokens_at_updates"
"""Key in vLLM's `kv_transfer_params` of a complete response; a dictionary that passes from the scheduler to the owner
unchanged. No other field of vLLM's messages does."""

_ALL: Final = sys.maxsize


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
