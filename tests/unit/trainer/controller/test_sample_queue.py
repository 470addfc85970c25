"""Which engine generates which samples: a table of queues, and engines that are done in any order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from ppojob_trainer.controller.sample_queue import LengthHistory, SampleQueue
from tests.unit.trainer.controller.fake_engines import FakeCapacity
from tests.unit.trainer.controller.fake_ports import FakeSample

ROOM = FakeCapacity()


def queue_of(
    lengths: Sequence[float], num_samples: int = 1, engines: Mapping[str, FakeCapacity] | None = None
) -> SampleQueue[str]:
    """Return the queue of prompts whose responses had these lengths before; a prompt itself has no tokens."""
    samples = [FakeSample(prompt, 0) for prompt in range(len(lengths)) for _ in range(num_samples)]
    history = LengthHistory()
    history.observe(samples, [int(length) for length in lengths for _ in range(num_samples)])
    return SampleQueue(samples, history, {"a": ROOM, "b": ROOM} if engines is None else engines)


def test_the_longest_are_dealt_first_and_the_tokens_evenly() -> None:
    queue = queue_of([10, 20, 30, 40, 50, 60, 70, 80])

    found = {engine: queue.take(engine) for engine in ("a", "b")}

    assert found == {"a": [7, 4, 3, 0], "b": [6, 5, 2, 1]}
    assert queue.num_waiting == 0


def test_without_a_history_the_longest_prompt_is_first() -> None:
    samples = [FakeSample(number, tokens) for number, tokens in enumerate([5, 9, 7])]

    assert SampleQueue(samples, LengthHistory(), {"a": FakeCapacity(2)}).take("a") == [1, 2, 0]
    assert SampleQueue(samples, LengthHistory(), {"a": FakeCapacity(1)}).take("a") == [1, 2], (
        "one more than it computes"
    )


def test_a_new_prompt_is_expected_to_be_as_long_as_the_mean() -> None:
    history = LengthHistory()
    history.observe([FakeSample(0, 1), FakeSample(0, 1), FakeSample(1, 1)], [10, 30, 40])

    assert [history.expected(FakeSample(prompt, 1)) for prompt in (0, 1, 2)] == [20, 40, 30]
    history.observe([FakeSample(0, 1)], [100])
    assert [history.expected(FakeSample(prompt, 1)) for prompt in (0, 2)] == [100, 70], "the last epoch counts"


def test_samples_of_a_prompt_stay_together_where_the_shares_stay_equal() -> None:
    queue = queue_of([10, 10, 10, 10], num_samples=4)
    assert sorted(queue.take("a")) in ([0, 1, 2, 3, 8, 9, 10, 11], [0, 1, 2, 3, 12, 13, 14, 15])

    queue = queue_of([10, 10, 10], num_samples=4)
    assert [len(queue.take(engine)) for engine in ("a", "b")] == [6, 6]


@pytest.mark.parametrize(
    ("capacity", "first"),
    [
        (FakeCapacity(8), 9),
        (FakeCapacity(64), 32),
        # 16 of 10 tokens in a cache of 160, and an eighth more.
        (FakeCapacity(64, cache_tokens=160), 18),
        # One that needs more than the cache is generated alone.
        (FakeCapacity(64, cache_tokens=5), 1),
    ],
)
def test_the_first_fill_is_a_little_more_than_an_engine_computes_but_never_more_than_its_share(
    capacity: FakeCapacity, first: int
) -> None:
    queue = queue_of([10] * 64, engines={"a": capacity, "b": capacity})

    rows = queue.take("a")

    assert len(rows) == first
    assert queue.take("a") == [], "it has enough"
    queue.finish("a", rows[:1])
    assert len(queue.take("a")) == 1
    assert queue.num_waiting == 64 - first - 1


def test_an_engine_that_is_done_takes_what_others_have_not_begun() -> None:
    queue = queue_of([10] * 8)

    first = queue.take("a")
    queue.finish("a", first)
    second = queue.take("a")

    assert sorted(first + second) == list(range(8))
    assert queue.take("b") == []
    assert queue.num_held("b") == 0


def test_the_rest_of_a_prompt_waits_for_the_first_free_engine() -> None:
    engines = {"a": FakeCapacity(3), "b": FakeCapacity(100)}
    queue = queue_of([10] * 4, num_samples=4, engines=engines)
    first = queue.take("a")
    assert len(first) == 4

    found = queue.take("b")
    queue.finish("b", found)
    found += queue.take("b")

    assert sorted(first + found) == list(range(16)), "no sample waits while an engine is free"


@pytest.mark.parametrize(("finished", "repeated"), [((), 3), ((0, 1), 5)])
def test_samples_of_a_lost_engine_go_to_the_others_at_once(finished: tuple[int, ...], repeated: int) -> None:
    queue = queue_of([10] * 10)
    mine, others = queue.take("a"), queue.take("b")
    queue.finish("a", mine[:2])

    assert len(queue.lose("a", [mine[number] for number in finished])) == repeated

    again = queue.take("b")
    assert sorted(again) == sorted([mine[number] for number in finished] + mine[2:])
    assert queue.num_held("b") == len(others) + repeated


def test_what_was_dealt_to_a_lost_engine_is_not_repeated() -> None:
    queue = queue_of([10] * 10)

    assert queue.lose("b") == []
    assert sorted(queue.take("a")) == list(range(10))


@pytest.mark.parametrize(
    ("num_engines", "num_rows", "streamed", "whole"),
    [(1, 1600, 100, 1600), (2, 1600, 50, 800), (16, 1600, 25, 100), (64, 640, 5, 10), (1, 3, 1, 3)],
)
def test_a_part_follows_from_what_an_engine_has(num_engines: int, num_rows: int, streamed: int, whole: int) -> None:
    engines = {str(number): FakeCapacity(10_000) for number in range(num_engines)}
    queue = queue_of([10] * num_rows, engines=engines)
    for engine in engines:
        queue.take(engine)

    assert queue.rows_of_part("0", is_streamed=True) == streamed
    assert queue.rows_of_part("0", is_streamed=False) == whole


def test_an_engine_asks_for_more_before_its_reserve_is_used_up() -> None:
    queue = queue_of([10] * 1000, engines={"a": FakeCapacity(64)})
    assert len(queue.take("a")) == 72

    assert queue.rows_of_part("a", is_streamed=False) == 9
    assert queue.rows_of_part("a", is_streamed=True) == 9


def test_parts_become_smaller_while_samples_may_be_added() -> None:
    queue = queue_of([10] * 512, engines={"a": FakeCapacity(10_000)})
    rows, sizes = queue.take("a"), []
    while rows:
        sizes.append(queue.rows_of_part("a", is_streamed=True, is_open=True))
        queue.finish("a", rows[: sizes[-1]])
        del rows[: sizes[-1]]

    assert sizes[0] == 32
    assert sizes == sorted(sizes, reverse=True)
    # The last finished responses do not wait for the slowest one.
    assert sizes[-8:] == [1] * 8


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_generated_once_whatever_happens(seed: int) -> None:
    draw = random.Random(seed)
    num_samples = draw.choice([1, 3, 4])
    engines = {
        str(number): FakeCapacity(draw.choice([1, 5, 64]), draw.choice([0, 50, 500]))
        for number in range(draw.randint(2, 5))
    }
    lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 30))]
    queue, alive = queue_of(lengths, num_samples, engines), set(engines)
    held: dict[str, list[int]] = {engine: [] for engine in engines}
    done: dict[str, list[int]] = {engine: [] for engine in engines}
    while queue.num_waiting or any(held[engine] for engine in alive):
        engine = draw.choice(sorted(alive))
        held[engine] += queue.take(engine)
        assert len(held[engine]) == queue.num_held(engine)
        if not held[engine]:
            continue
        if len(alive) > 1 and draw.random() < 0.05:
            lost = done[engine] if draw.random() < 0.5 else []
            assert queue.lose(engine, lost) == sorted([*held[engine], *lost])
            done[engine] = [] if lost else done[engine]
            alive.remove(engine)
            continue
        number = queue.rows_of_part(engine, is_streamed=draw.random() < 0.5)
        assert 1 <= number <= len(held[engine])
        rows = [held[engine].pop(0) for _ in range(number)]
        queue.finish(engine, rows)
        done[engine] += rows

    assert sorted(row for rows in done.values() for row in rows) == list(range(len(lengths) * num_samples))
