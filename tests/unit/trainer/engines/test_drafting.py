"""When steps have drafts: the faster way is found by measuring, for each size of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from ppojob_trainer.engines.rollout.drafting import (
    FIRST_STRETCH,
    LONGEST_STRETCH,
    TRIAL_STEPS,
    UNSETTLED_STEPS,
    DraftingChoice,
)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Engine:
    """Takes so many seconds for a step with or without drafts, and keeps so many tokens of a response's drafts."""

    seconds: Callable[[int, bool], float]
    kept: Callable[[int], float]
    choice: DraftingChoice = field(init=False)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.choice = DraftingChoice(16, self.clock)

    def run(self, num_sequences: int, num_steps: int) -> list[bool]:
        """Return of each step whether it had drafts."""
        found = []
        for _ in range(num_steps):
            has_drafts = self.choice.wants_drafts(num_sequences)
            self.clock.now += self.seconds(num_sequences, has_drafts)
            num_tokens = num_sequences * (1 + (self.kept(num_sequences) if has_drafts else 0))
            self.choice.observe(num_sequences, round(num_tokens), has_drafts=has_drafts)
            found.append(has_drafts)
        return found


def slower_by(factor: float) -> Callable[[int, bool], float]:
    return lambda _, has_drafts: 0.003 * (factor if has_drafts else 1.0)


TRIALS = 2 * (TRIAL_STEPS + UNSETTLED_STEPS) + 2


@pytest.mark.parametrize(
    ("factor", "kept", "pays"), [(1.2, 0.5, True), (1.2, 0.0, False), (2.0, 0.5, False), (3.0, 3.0, True)]
)
def test_the_way_that_generates_more_tokens_per_second_continues(factor: float, kept: float, pays: bool) -> None:
    # Of eight sequences, so that kept tokens are whole numbers.
    found = Engine(slower_by(factor), lambda _: kept).run(8, TRIALS + FIRST_STRETCH)

    assert {True, False} == set(found[:TRIALS])
    assert set(found[TRIALS:]) == {pays}


def test_the_other_way_is_tried_again_less_and_less_often() -> None:
    found = Engine(slower_by(2.0), lambda _: 0.0).run(1, 12_000)
    trials = [number for number in range(1, len(found)) if found[number] and not found[number - 1]]
    gaps = [later - sooner for sooner, later in pairwise(trials)]

    assert sum(found) < 0.02 * len(found)
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(LONGEST_STRETCH, abs=3 * TRIAL_STEPS)


def test_each_size_of_the_batch_has_its_own_choice() -> None:
    engine = Engine(lambda number, drafts: 0.003 * (1 + number / 4 if drafts else 1), lambda _: 1.0)

    engine.run(1, 500)
    engine.run(8, 500)

    assert engine.choice.wants_drafts(8) is False
    assert engine.run(1, 200).count(True) > 100


def test_a_change_of_the_text_changes_the_choice() -> None:
    kept = [1.0]
    engine = Engine(slower_by(1.5), lambda _: kept[0])
    engine.run(4, 400)
    assert engine.choice.wants_drafts(4)

    kept[0] = 0.0
    engine.run(4, 3000)

    assert not engine.choice.wants_drafts(4)


def test_many_sequences_have_no_drafts_and_nothing_is_measured() -> None:
    engine = Engine(slower_by(1.0), lambda _: 3.0)

    assert not any(engine.run(17, 500))
    assert engine.choice.wants_drafts(16)


def test_a_pause_between_two_generations_is_no_step() -> None:
    with_pauses, without = (Engine(slower_by(1.2), lambda _: 0.5) for _ in range(2))
    for _ in range(100):
        # The pause comes while steps have no drafts, and would make them look slow.
        with_pauses.clock.now += 0.0 if with_pauses.choice.wants_drafts(8) else 1000.0
        with_pauses.choice.interrupt()
        with_pauses.run(8, 10)
        without.run(8, 10)

    rates = {way: with_pauses.choice._size(8).rates[way] for way in (True, False)}
    assert rates == pytest.approx({way: without.choice._size(8).rates[way] for way in (True, False)})
