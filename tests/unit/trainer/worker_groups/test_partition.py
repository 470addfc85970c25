"""Which rows go to which rank."""

import pytest

from ppojob_trainer.worker_groups.partition import (
    Partition,
    Share,
    balanced,
    contiguous,
    in_groups,
    in_minibatches,
    spread,
)

LENGTHS = [9, 1, 5, 5, 8, 2, 7, 3, 4, 6, 9, 1]


def real_rows(partition: Partition) -> list[int]:
    """Rows of all shares without the copies."""
    return sorted(
        row for share in partition for position, row in enumerate(share.rows) if position not in share.padding
    )


def tokens(share: Share, lengths: list[int]) -> int:
    return sum(lengths[row] for row in share.rows)


def test_equal_parts_keep_the_order() -> None:
    assert contiguous(4, 2) == (Share((0, 1)), Share((2, 3)))


def test_what_does_not_divide_is_filled_up_with_copies_of_the_first_rows() -> None:
    assert contiguous(5, 4) == (
        Share((0, 1)),
        Share((2, 3)),
        Share((4, 0), frozenset({1})),
        Share((1, 2), frozenset({0, 1})),
    )


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(1, 3), (7, 2), (12, 5), (12, 12), (64, 8)])
@pytest.mark.parametrize("cut", [contiguous, lambda n, r: balanced(LENGTHS * 8 if n > 12 else LENGTHS[:n], r)])
def test_every_row_is_there_once_and_all_shares_are_equally_long(cut: object, num_rows: int, num_ranks: int) -> None:
    if num_rows > 12 and cut is not contiguous:
        num_rows = len(LENGTHS) * 8

    partition: Partition = cut(num_rows, num_ranks)  # type: ignore[operator]

    assert real_rows(partition) == list(range(num_rows))
    assert len({len(share.rows) for share in partition}) == 1


def test_balanced_shares_have_nearly_equal_tokens() -> None:
    sums = [tokens(share, LENGTHS) for share in balanced(LENGTHS, 3)]

    assert max(sums) - min(sums) <= 1
    assert [tokens(share, LENGTHS) for share in contiguous(12, 3)] == [20, 20, 20] or max(sums) <= 21


def test_spread_parts_differ_by_one_row_and_hold_no_copies() -> None:
    partition = spread(7, 3)

    assert [share.rows for share in partition] == [(0, 1), (2, 3), (4, 5, 6)]
    assert not any(share.padding for share in partition)


def test_spread_leaves_ranks_without_rows_empty() -> None:
    assert [len(share.rows) for share in spread(2, 4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_minibatch_holds_the_same_rows_for_any_number_of_ranks(num_ranks: int) -> None:
    partition = in_minibatches(LENGTHS, 4, num_ranks)

    length = len(partition[0].rows)
    assert length % 3 == 0
    for number in range(3):
        part = slice(number * length // 3, (number + 1) * length // 3)
        rows = {row for share in partition for row in share.rows[part]}
        assert rows == set(range(4 * number, 4 * number + 4))
    assert real_rows(partition) == list(range(12))


def test_copies_in_a_minibatch_are_marked_where_they_stand() -> None:
    first, second, third = in_minibatches([1, 1, 1, 1], 2, 3)

    assert [len(share.rows) for share in (first, second, third)] == [2, 2, 2]
    assert sum(len(share.padding) for share in (first, second, third)) == 2


def test_groups_stay_whole() -> None:
    first, second = in_groups(num_rows=9, group_rows=3, num_ranks=2)

    assert first == Share((0, 1, 2, 3, 4, 5))
    assert second == Share((6, 7, 8, 0, 1, 2), frozenset({3, 4, 5}))


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda: contiguous(0, 2), "0 rows for 2 ranks"),
        (lambda: spread(3, 0), "3 rows for 0 ranks"),
        (lambda: in_minibatches([1, 2, 3], 2, 1), "minibatches of 2 rows do not divide the batch of 3"),
        (lambda: in_groups(4, 3, 1), "groups of 3 rows do not divide the batch of 4"),
    ],
)
def test_what_cannot_be_cut_is_refused(cut: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut()  # type: ignore[operator]
