"""Which source of a mixture the next prompt comes from."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ppojob_trainer.data.apportionment import Apportionment


def sources(weights: list[float], count: int) -> list[int]:
    """The sources of the first prompts."""
    apportionment, drawn = Apportionment(weights), [0] * len(weights)
    found = []
    for _ in range(count):
        source = apportionment.next_source(drawn)
        drawn[source] += 1
        found.append(source)
    return found


def test_a_sequence_by_hand() -> None:
    # Shares 0.5, 0.3 and 0.2 of a, b and c. A source is behind if it has given less than its share of n prompts. Its
    # next prompt is due at (given + 1) / share.
    #
    #  n   given   shares of n     behind   due             chosen
    #  1   0 0 0   0.5  0.3  0.2   a b c    2    3.3  5     a
    #  2   1 0 0   1.0  0.6  0.4   b c           3.3  5     b
    #  3   1 1 0   1.5  0.9  0.6   a c      4         5     a
    #  4   2 1 0   2.0  1.2  0.8   b c           6.7  5     c
    #  5   2 1 1   2.5  1.5  1.0   a b      6    6.7        a
    #  6   3 1 1   3.0  1.8  1.2   b c           6.7  10    b
    #  7   3 2 1   3.5  2.1  1.4   a b c    8    10   10    a
    #  8   4 2 1   4.0  2.4  1.6   b c           10   10    b, the first
    #  9   4 3 1   4.5  2.7  1.8   a c      10        10    a, the first
    # 10   5 3 1   5.0  3.0  2.0   c                  10    c
    assert sources([0.5, 0.3, 0.2], 10) == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


def test_equal_weights_take_turns() -> None:
    assert sources([2.5, 2.5, 2.5], 7) == [0, 1, 2, 0, 1, 2, 0]


def test_one_source_gives_every_prompt() -> None:
    assert sources([0.3], 4) == [0] * 4


def test_weights_count_relative_to_each_other_and_as_they_are_written() -> None:
    # As binary fractions, 0.1 + 0.2 is not 0.3.
    assert sources([0.1, 0.2, 0.7], 100) == sources([1, 2, 7], 100) == sources([1e-7, 2e-7, 7e-7], 100)


WEIGHTS = st.lists(st.floats(1e-3, 1e3) | st.integers(1, 100).map(float), min_size=1, max_size=16)


@given(weights=WEIGHTS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_every_source_has_its_share_within_one_prompt_at_every_prefix(weights: list[float]) -> None:
    drawn, total = [0] * len(weights), sum(weights)
    for count, source in enumerate(sources(weights, 200), start=1):
        drawn[source] += 1
        for given_prompts, weight in zip(drawn, weights, strict=True):
            assert abs(given_prompts - count * weight / total) < 1 + 1e-9, (count, drawn)


def test_weights_with_which_the_largest_deficit_would_be_more_than_one_prompt_behind() -> None:
    weights = [20.0, 100, 100, 7, 1, 2, 100, 2, 20, 1, 100, 7, 1, 1, 5, 1]
    drawn, total = [0] * len(weights), sum(weights)
    furthest = 0.0
    for count, source in enumerate(sources(weights, 1000), start=1):
        drawn[source] += 1
        furthest = max(furthest, *(abs(n - count * w / total) for n, w in zip(drawn, weights, strict=True)))
    assert furthest < 1
