"""`ResponseScheduler` with drafts: responses are those of vLLM's scheduler, however the choice for drafts changes.

No model runs: which drafts are kept is a function of request and position, and results arrive a step late, as on a GPU.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.engines.test_response_scheduler import (
    Seen,
    complete,
    folder,
    make,
    make_request,
    note_steps,
    receive,
)

__all__ = ["folder"]

# Loading vLLM takes many seconds.
pytestmark = pytest.mark.slow

NUM_DRAFTS, MOST = 3, 6
SPECULATIVE = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
    "num_speculative_tokens_per_batch_size": [(1, MOST, NUM_DRAFTS), (MOST + 1, 12, 0)],
}


@dataclass
class Model:
    """What it has sampled for each request, and how many drafts were checked and kept."""

    lengths: dict[str, int] = field(default_factory=dict)
    num_checked: int = 0
    num_kept: int = 0

    def answer(self, output: Any) -> Any:
        """Sample a token for each request, after some of its drafts. All prompts are computed in one step."""
        import numpy as np
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names, tokens, rows, first_rows = list(output.num_scheduled_tokens), [], [], [0]
        for name in names:
            position, drafts = self.lengths.get(name, 0), output.scheduled_spec_decode_tokens.get(name, ())
            kept = random.Random(f"{name}/{position}").randint(0, len(drafts))
            self.num_checked, self.num_kept = self.num_checked + len(drafts), self.num_kept + kept
            sampled = [token(name, position + number) for number in range(kept + 1)]
            self.lengths[name] = position + len(sampled)
            tokens.append([one for one, _ in sampled])
            # vLLM has a row for each draft, kept or not.
            rows += [*sampled, *[(0, 0.0)] * (len(drafts) - kept)]
            first_rows.append(len(rows))
        log_probs = LogprobsLists(
            np.array([[one] for one, _ in rows], dtype=np.int32),
            np.array([[value] for _, value in rows], dtype=np.float32),
            np.arange(1, len(rows) + 1, dtype=np.int64),
            first_rows if len(rows) > len(names) else None,
        )
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=log_probs,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def token(name: str, position: int) -> tuple[int, float]:
    draw = random.Random(f"{name}/{position}")
    return draw.randrange(1, 64), -draw.random()


def drive(scheduler: Any, seed: int, depth: int) -> tuple[Seen, Model]:
    """Send requests at random steps, abort some, and answer each step `depth - 1` steps later."""
    chance, seen, model = random.Random(seed), Seen(), Model()
    waiting = deque(make_request(number, chance, 0.0) for number in range(30))
    running: deque[Any] = deque()
    for _ in range(10_000):
        while waiting and chance.random() < 0.4:
            scheduler.add_request(waiting.popleft())
        if scheduler.has_requests() and len(running) < depth:
            output = scheduler.schedule()
            running.append((output, model.answer(output)))
        if running and (len(running) == depth or not scheduler.has_requests()):
            output, found = running.popleft()
            receive(scheduler, output, found, seen)
        if not waiting and not running and not scheduler.has_requests():
            return seen, model
    raise AssertionError("it did not end")


def chooses(choice: Callable[[int], bool]) -> Callable[[Any], None]:
    def change(scheduler: Any) -> None:
        scheduler._drafting.wants_drafts = choice

    return change


def at_random(scheduler: Any) -> None:
    chance = random.Random(7)
    scheduler._drafting.wants_drafts = lambda number: number <= MOST and chance.random() < 0.5


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("change", "drafts", "decodes"),
    [
        (chooses(lambda number: number <= MOST), True, True),
        (chooses(lambda _: False), False, True),
        (chooses(lambda _: True), True, False),
        (at_random, True, True),
        (lambda _: None, True, True),
    ],
    ids=["few", "never", "always", "at random", "measured"],
)
def test_responses_are_those_without_drafts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Any], None],
    drafts: bool,
    decodes: bool,
    depth: int,
) -> None:
    steps: list[bool] = []
    num_checked = num_kept = 0
    for seed in range(4):
        expected, _ = drive(make("vllm", folder, 400, monkeypatch), seed, depth)
        scheduler = make("ours", folder, 400, monkeypatch, "2", speculative_config=SPECULATIVE)
        change(scheduler)
        note_steps(scheduler, steps)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

        seen, model = drive(scheduler, seed, depth)

        assert without_ranks(seen) == without_ranks(expected)
        assert len(complete(seen)) == 30
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
        assert not any((scheduler._responses, scheduler._decoding, scheduler._has_drafts))
        num_checked, num_kept = num_checked + model.num_checked, num_kept + model.num_kept
    assert (0 < num_kept < num_checked) == drafts
    assert (sum(steps) > 20) == decodes


def without_ranks(seen: Seen) -> dict[str, Any]:
    """Return the responses. A rank counts the rows of its step, drafts included."""
    return {
        name: {key: value for key, value in response.items() if key != "ranks"}
        for name, response in complete(seen).items()
    }


def test_it_measures_what_it_schedules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make("ours", folder, 400, monkeypatch, "2", speculative_config=SPECULATIVE)
    observed: list[tuple[int, int, bool]] = []

    def observe(num_sequences: int, num_tokens: int, *, has_drafts: bool) -> None:
        observed.append((num_sequences, num_tokens, has_drafts))

    scheduler._drafting.observe = observe
    scheduler._drafting.wants_drafts = lambda number: number <= MOST
    drive(scheduler, 1, 2)

    assert {has_drafts for number, _, has_drafts in observed if number > MOST + 2} == {False}
    assert any(tokens > number for number, tokens, has_drafts in observed if has_drafts)
    assert all(tokens <= number for number, tokens, has_drafts in observed if number > 2 * MOST)
