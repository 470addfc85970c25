"""What an unfinished response keeps when the weights change: its cache, for itself alone, and a count of its tokens."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.engines.errors import RolloutError
from ppojob_trainer.engines.rollout.weight_changes import TOKENS_AT_UPDATES, clear_cache, versions_of_tokens
from tests.unit.trainer.engines.test_response_scheduler import (
    BLOCK,
    Seen,
    answer,
    complete,
    folder,
    make,
    make_request,
    receive,
)

__all__ = ["folder"]

PROMPT = [5] * (3 * BLOCK + 1)


@pytest.mark.parametrize(
    ("num_tokens", "tokens_at_updates", "versions", "expected"),
    [
        (3, [], [0], [0, 0, 0]),
        (3, [], [0, 4, 5], [5, 5, 5]),
        (4, [1], [0, 4, 5], [4, 5, 5, 5]),
        (4, [1, 3], [0, 4, 5], [0, 4, 4, 5]),
        # It waited for its first step during the first update.
        (3, [0, 2], [3, 4, 5], [4, 4, 5]),
        (3, [1, 1], [3, 4, 5], [3, 5, 5]),
        # The same version twice: the first transfer was lost with an engine.
        (2, [1], [3, 4, 4], [4, 4]),
    ],
)
def test_versions_follow_from_the_counts(
    num_tokens: int, tokens_at_updates: list[int], versions: list[int], expected: list[int]
) -> None:
    assert versions_of_tokens(num_tokens, tokens_at_updates, versions) == expected


def request(name: str, num_tokens: int) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, list(PROMPT), sampling, None, arrival_time=0.0, block_hasher=hasher)


def steps(scheduler: Any, number: int, lengths: dict[str, int]) -> dict[str, Any]:
    """Run steps; return the computed tokens with which each new request began, and the messages of complete ones."""
    found: dict[str, Any] = {"begun": {}, "ended": {}}
    for _ in range(number):
        output = scheduler.schedule()
        found["begun"] |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for of_client in scheduler.update_from_output(output, answer(output, scheduler, lengths)).values():
            found["ended"] |= {one.request_id: one for one in of_client.outputs}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["1", "2"])
def test_a_new_request_finds_no_block_of_an_unfinished_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    scheduler, lengths = make("ours", folder, 60, monkeypatch, runner), dict[str, int]()
    scheduler.add_request(request("old", 30))
    steps(scheduler, 2, lengths)
    scheduler.add_request(request("twin", 30))
    assert steps(scheduler, 3, lengths)["begun"] == {"twin": 3 * BLOCK}, "the prompt's blocks are shared"

    assert scheduler.reset_prefix_cache()

    # Both fill further blocks with what new weights compute from the cache of old ones.
    steps(scheduler, 2 * BLOCK, lengths)
    pool = scheduler.kv_cache_manager.block_pool
    assert [block.block_id for block in pool.blocks if block.block_hash is not None] == []
    scheduler.add_request(request("new", 3))
    assert steps(scheduler, 1, lengths)["begun"] == {"new": 0}
    scheduler.add_request(request("newer", 3))
    assert steps(scheduler, 1, lengths)["begun"] == {"newer": 3 * BLOCK}, "new weights fill the cache again"
    ended = steps(scheduler, 30, lengths)["ended"]
    assert {name: len(one.new_token_ids) for name, one in ended.items()} == {
        "old": 30,
        "twin": 30,
        "new": 3,
        "newer": 3,
    }
    assert [ended[name].kv_transfer_params for name in ("old", "twin", "new")] == [
        {TOKENS_AT_UPDATES: [5]},
        {TOKENS_AT_UPDATES: [3]},
        None,
    ]


def interrupted(scheduler: Any, depth: int, every: int) -> Seen:
    """Answer each step `depth - 1` steps later; after some steps, pause as vLLM does, and change the weights."""
    from vllm.v1.core.sched.interface import PauseState

    chance, seen, lengths = random.Random(3), Seen(), dict[str, int]()
    waiting = deque(make_request(number, chance, 0.0) for number in range(30))
    running: deque[Any] = deque()
    for step in range(1, 10_000):
        if waiting:
            scheduler.add_request(waiting.popleft())
        if step % every == 0:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            assert not scheduler.has_unfinished_requests()
            while running:
                receive(scheduler, *running.popleft(), seen)
            assert scheduler.reset_prefix_cache()
            scheduler.set_pause_state(PauseState.UNPAUSED)
        if scheduler.has_requests():
            output = scheduler.schedule()
            running.append((output, answer(output, scheduler, lengths)))
        if running and (len(running) == depth or not scheduler.has_requests()):
            receive(scheduler, *running.popleft(), seen)
        if not waiting and not running and not scheduler.has_requests():
            return seen
    raise AssertionError("it did not end")


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("runner", ["1", "2"])
@pytest.mark.parametrize("num_blocks", [400, 36])
def test_pauses_change_no_response(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, runner: str, depth: int
) -> None:
    """With few blocks, requests are preempted, and compute their blocks again."""
    never = interrupted(make("ours", folder, num_blocks, monkeypatch, runner), depth, every=10_000)
    often = interrupted(make("ours", folder, num_blocks, monkeypatch, runner), depth, every=3)

    assert len(complete(never)) == 30
    assert without_ranks(often) == without_ranks(never)


def without_ranks(seen: Seen) -> dict[str, Any]:
    """Return the complete responses without the ranks, which here name the row of the step."""
    return {
        name: {key: value for key, value in response.items() if key != "ranks"}
        for name, response in complete(seen).items()
    }


def test_a_cache_is_cleared_as_soon_as_no_request_has_a_block() -> None:
    answers = deque([False, False, True])

    async def reset() -> bool:
        return answers.popleft()

    asyncio.run(clear_cache(reset))

    assert not answers


def test_a_cache_that_is_never_cleared_is_an_error() -> None:
    async def reset() -> bool:
        return False

    with pytest.raises(RolloutError, match=r"not cleared its prefix cache for 0\.1 s, because requests still"):
        asyncio.run(clear_cache(reset, limit_s=0.1))
