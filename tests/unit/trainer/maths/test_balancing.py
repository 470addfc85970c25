"""Karmarkar-Karp: the paper's example, its promises on many random inputs, and how near it comes to the best."""

import itertools
import random

import pytest

from ppojob_trainer.maths.balancing import balance_over_ranks, karmarkar_karp, sequence_work


def sums(weights, parts) -> list[float]:
    return sorted(sum(weights[item] for item in part) for part in parts)


def best_spread(weights, num_parts: int) -> float:
    spreads = []
    for choice in itertools.product(range(num_parts), repeat=len(weights)):
        totals = [0.0] * num_parts
        for weight, part in zip(weights, choice, strict=True):
            totals[part] += weight
        spreads.append(max(totals) - min(totals))
    return min(spreads)


def test_the_classical_example() -> None:
    # {8, 7, 6, 5, 4}: differencing gives 16 and 14, where greedy gives 17 and 13.
    assert sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2)) == [14, 16]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("equal_size", [True, False])
def test_every_item_is_in_one_part(seed: int, equal_size: bool) -> None:
    rng = random.Random(seed)
    num_parts = rng.randint(1, 6)
    count = num_parts * rng.randint(1, 8) + (0 if equal_size else rng.randint(0, num_parts - 1))
    weights = [rng.randint(1, 2000) for _ in range(count)]
    parts = karmarkar_karp(weights, num_parts, equal_size)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(count))
    assert len(parts) == num_parts
    assert all(parts)
    assert parts == sorted(sorted(part) for part in parts)
    if equal_size:
        assert {len(part) for part in parts} == {count // num_parts}
    assert karmarkar_karp(weights, num_parts, equal_size) == parts


@pytest.mark.parametrize("seed", range(10))
def test_it_comes_near_the_best(seed: int) -> None:
    rng = random.Random(seed)
    weights = [rng.randint(1, 100) for _ in range(8)]
    got = sums(weights, karmarkar_karp(weights, 3))
    assert got[-1] - got[0] <= best_spread(weights, 3) + 25


def test_it_balances_real_lengths() -> None:
    rng = random.Random(0)
    lengths = [min(2048, int(rng.lognormvariate(5.5, 0.8))) for _ in range(512)]
    parts = balance_over_ranks(lengths, 8)
    totals = sums(lengths, parts)
    naive = [sum(lengths[rank * 64 : rank * 64 + 64]) for rank in range(8)]
    assert totals[-1] / totals[0] < 1.001 < max(naive) / min(naive)


def test_fewer_items_than_parts_leaves_parts_empty() -> None:
    assert karmarkar_karp([5, 3], 4) == [[0], [1], [], []]
    assert karmarkar_karp([], 2) == [[], []]


@pytest.mark.parametrize(
    ("weights", "num_parts", "equal", "message"),
    [([1], 0, False, "at least 1"), ([1, 2, 3], 2, True, "3 items cannot be divided into 2 parts of equal size")],
)
def test_what_is_refused(weights, num_parts, equal, message) -> None:
    with pytest.raises(ValueError, match=message):
        karmarkar_karp(weights, num_parts, equal)


def test_work_counts_tokens_or_operations() -> None:
    assert sequence_work([10, 20]) == [10.0, 20.0]
    # Layer of hidden size D: 24 D^2 L + 4 D L^2 operations, in units of 4 D.
    assert sequence_work([10], hidden_size=8) == [(24 * 64 * 10 + 4 * 8 * 100) / (4 * 8)]
