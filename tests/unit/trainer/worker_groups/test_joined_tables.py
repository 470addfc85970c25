"""Parts of a batch put back together: arithmetic on row numbers, before any row is fetched."""

import asyncio
from typing import Any

import numpy as np
import pytest

from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.controller.metrics import staleness_metrics
from ppojob_trainer.protocol import DataProto, Keys, rollout_batch
from ppojob_trainer.worker_groups import stored_rows
from ppojob_trainer.worker_groups.partition import spread
from ppojob_trainer.worker_groups.roles.reward import RewardGroup
from ppojob_trainer.worker_groups.roles.rollout_group import RolloutOfStep
from ppojob_trainer.worker_groups.stored_rows import rows_of_block
from ppojob_trainer.worker_groups.table import Source, Table
from tests.good_spec import GOOD


def part(results: tuple[str, ...], result_of: list[int], position_of: list[int], **known: Any) -> Table:
    """A table of one source, whose results are names in place of Ray's references."""
    source = Source(results, np.array(result_of), np.array(position_of))  # type: ignore[arg-type]
    return Table((source,), **known)


async def never(_: Table) -> None:
    raise AssertionError("no samples are written")


def where(table: Table) -> list[tuple[Any, int]]:
    """Return, for each row, the result that holds it and its position there."""
    (source,) = table.sources
    rows = zip(source.result_of, source.position_of, strict=True)
    return [(source.results[result], int(position)) for result, position in rows]


def test_each_row_comes_to_its_number() -> None:
    one = part(("a",), [0, 0], [0, 1], sums={"mask": (10, 11)})
    two = part(("b", "c"), [1, 0], [0, 0], sums={"mask": (12, 13)})

    joined = one.join_rows([two], [3, 0, 2, 1])

    assert where(joined) == [("a", 1), ("b", 0), ("c", 0), ("a", 0)]
    assert joined.sums == {"mask": (11, 13, 12, 10)}


def test_parts_that_replace_columns_still_do_when_they_are_one() -> None:
    one, two = (part((name,), [0], [0]).replacing() for name in "ab")

    joined = part(("c",), [0, 0], [0, 1]).union(one.join_rows([two], [0, 1]))

    assert [source.replaces for source in joined.sources] == [False, True]


def test_what_the_parts_measured_is_joined_too() -> None:
    one, two = (part(("a",), [0], [0], metrics={"score": [value]}) for value in (1.0, 3.0))

    assert one.join_rows([two], [1, 0]).metrics == {"score": [1.0, 3.0]}


def test_sums_that_a_part_does_not_know_are_left_out() -> None:
    one, two = part(("a",), [0], [0], sums={"mask": (1,)}), part(("b",), [0], [0])

    assert one.join_rows([two], [0, 1]).sums == {}


@pytest.mark.parametrize("numbers", [[0], [0, 0], [0, 2], [0, 1, 2]])
def test_numbers_that_are_no_permutation_are_refused(numbers: list[int]) -> None:
    one, two = part(("a",), [0], [0]), part(("b",), [0], [0])

    with pytest.raises(ValueError, match="a number for each of 2 rows"):
        one.join_rows([two], numbers)


def test_tables_of_other_columns_are_refused() -> None:
    one, two = part(("a",), [0], [0]), part(("b",), [0], [0])

    with pytest.raises(ValueError, match=r"\[1, 2\] sources"):
        one.join_rows([two.union(two)], [0, 1])


@pytest.mark.parametrize(
    ("num_rows", "num_bytes", "expected"),
    [(256, 5_000, 256), (256, 8 * 1024**2, 32), (256, 1024**3, 8), (1, 0, 1), (1000, 1024**3, 32), (3, 1024**3, 1)],
)
def test_blocks_are_neither_too_many_nor_too_small(num_rows: int, num_bytes: int, expected: int) -> None:
    assert rows_of_block(num_rows, num_bytes) == expected


def test_the_controller_sees_how_old_the_weights_of_each_response_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "_store_column", lambda column: None)
    versions = [[4, 4, 5, 6], [5, 5], [6]]
    tokens = [[1] * len(row) for row in versions]
    batch = DataProto.from_dict(rollout_batch([[1]] * 3, tokens, versions=versions))

    stored = stored_rows.store_rows(batch)

    found = RolloutOfStep(part(("a",), [0, 0, 0], [0, 1, 2], sums=stored.sums))
    assert found.oldest_versions == [4, 5, 6]
    assert found.newer_tokens == [2, 0, 0]
    assert staleness_metrics(8, 4, found) == {
        "staleness/max": 3,
        "staleness/mean": 2,
        "staleness/oldest_version": 4,
        "staleness/mixed_samples_fraction": pytest.approx(1 / 3),
        "staleness/newer_tokens_fraction": pytest.approx(2 / 7),
    }


def test_the_controller_sees_which_responses_have_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "_store_column", lambda column: None)
    batch = DataProto.from_dict(rollout_batch([[1]] * 3, [[2]] * 3), {Keys.REWARD_ERROR: ["", "it raised", ""]})

    assert stored_rows.store_rows(batch).sums[Keys.REWARD_ERROR] == [0.0, 1.0, 0.0]


def test_sums_follow_their_columns() -> None:
    rollout = part(("a",), [0], [0], sums={Keys.RESPONSE_MASK: (7,), Keys.INPUT_IDS: (9,)})
    scores = part(("b",), [0], [0], sums={Keys.RESPONSE_MASK: (0,), Keys.TOKEN_LEVEL_SCORES: (0.5,)})

    assert rollout.union(scores).sums[Keys.RESPONSE_MASK] == (7,)
    replaced = {Keys.RESPONSE_MASK: (0,), Keys.INPUT_IDS: (9,), Keys.TOKEN_LEVEL_SCORES: (0.5,)}
    assert rollout.union(scores.replacing()).sums == replaced
    assert rollout.replaced_by(scores).sums == replaced


def test_a_dropped_response_has_no_score() -> None:
    rollout = part(("a",), [0, 0], [0, 1], sums={Keys.RESPONSE_MASK: (7, 5)})
    masks, scores = (0, 5), (0.5, 0.25)
    table = part(("b",), [0, 0], [0, 1], sums={Keys.RESPONSE_MASK: masks, Keys.TOKEN_LEVEL_SCORES: scores})
    reward = RewardGroup(None, {}, parse_spec(GOOD["spec"]), never)

    assert reward.row_scores(rollout.union(table.replacing())) == [None, 0.25]
    assert reward.row_scores(rollout.union(table)) == [0.5, 0.25]


class _Model:
    """A copy of a reward model; no test here calls it."""


@pytest.mark.parametrize(("number", "sampled"), [(4, [0, 2, 4, 6]), (0, None), (64, list(range(8)))])
def test_samples_of_a_step_are_of_all_its_rows_whichever_copy_has_scored_them(
    number: int, sampled: list[int] | None
) -> None:
    spec = parse_spec({**GOOD["spec"], "telemetry": {"samplesPerStep": number}})
    written: list[Table] = []

    async def write(rows: Table) -> None:
        written.append(rows)

    models: Any = {"reward_model": _Model(), "reward_model_actor": _Model()}
    reward = RewardGroup(None, models, spec, write)
    rollout = part(("responses",), [0] * 8, list(range(8)))
    # The second copy has scored all rows but one.
    metrics = {"source/a": [1.0] * 8}
    scores = part(("first", "second"), [1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 2, 0, 3, 4, 5, 6], metrics=metrics)

    asyncio.run(reward.total(rollout.union(scores)))
    asyncio.run(reward.validate(rollout, [scores]))

    assert [[int(row) for row in table.sources[0].position_of] for table in written] == [sampled] * 2 * bool(number)
    assert all(len(table.sources) == 2 for table in written), "the scores come with the responses"


@pytest.mark.parametrize("num_workers", [1, 8, 16])
def test_a_function_has_as_many_samples_with_any_number_of_workers(num_workers: int) -> None:
    """With 16 workers the first one has no row, and with 8 it has one. Rows without a score come first."""
    spec = parse_spec({**GOOD["spec"], "telemetry": {"samplesPerStep": 4}})
    written: list[Table] = []

    async def write(rows: Table) -> None:
        written.append(rows)

    function: Any = object()
    reward = RewardGroup(function, {}, spec, write)
    rollout = part(("responses",), [0] * 8, list(range(8)))
    shares = spread(8, num_workers)
    workers = [(worker, at) for worker, share in enumerate(shares) for at in range(len(share.rows))]
    scores = part(
        tuple(f"worker {number}" for number in range(num_workers)),
        [worker for worker, _ in workers],
        [at for _, at in workers],
        sums={Keys.REWARD_ERROR: (0.0,) * 5 + (1.0, 0.0, 0.0)},
        metrics={"source/a": [1.0] * 8},
    )

    batch = rollout.union(scores)
    assert asyncio.run(reward.total(batch)) == (batch, {})
    asyncio.run(reward.validate(rollout, [scores]))

    found = [[int(row) for row in table.sources[0].position_of] for table in written]
    assert found == [[5, 0, 2, 4]] * 2
