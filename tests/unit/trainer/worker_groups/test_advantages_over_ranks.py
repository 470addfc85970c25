"""Advantages and their statistics are those of the whole batch, however many ranks hold it."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AdvantageEstimator, AlgorithmSpec
from ppojob_trainer.maths.overlong import Overlong
from ppojob_trainer.protocol import DataProto, Keys, Meta, Ragged
from ppojob_trainer.rewards import RewardFunctionError
from ppojob_trainer.worker_groups.advantages import (
    READ_BY_ADVANTAGES,
    AdvantageSettings,
    compute_advantages,
    unread_by_advantages,
)
from ppojob_trainer.worker_groups.partition import Partition, in_groups

ROWS, WIDTH, SAMPLES = 6, 5, 2
ESTIMATORS_OF_API = [estimator.value for estimator in AdvantageEstimator]
OWN = {"path": str(Path("examples/12-own-algorithm/algorithm.py").absolute()), "needsGroups": True}


def algorithm_of(estimator: str, **fields: Any) -> AlgorithmSpec:
    """Return an algorithm with this estimator; Function is that of the example."""
    own = {"advantageFunction": OWN} if estimator == "Function" else {}
    return AlgorithmSpec.model_validate({"advantageEstimator": estimator, **own, **fields})


class ThreadRanks:
    """Ranks as threads: each hands its tensor in and waits for the others."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=120)
        self._given: list[Tensor] = []

    def sum(self, values: Tensor) -> Tensor:
        return self._together(values, lambda stacked: stacked.sum(dim=0))

    def max(self, values: Tensor) -> Tensor:
        return self._together(values, lambda stacked: stacked.max(dim=0).values)

    def _together(self, values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        self._given.append(values)
        self._barrier.wait()
        reduced = reduce(torch.stack(self._given))
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()
        return reduced


def batch() -> DataProto:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([5, 2, 4, 1, 3, 5])
    scores = torch.zeros(ROWS, WIDTH)
    scores[torch.arange(ROWS), lengths - 1] = torch.rand(ROWS, generator=generator)
    column = Ragged(torch.ones(int(lengths.sum()), dtype=torch.bool), lengths)
    return DataProto.from_dict(
        {
            Keys.RESPONSE_MASK: column,
            Keys.TOKEN_LEVEL_SCORES: column.unpadded(scores),
            Keys.VALUES: column.unpadded(torch.rand(ROWS, WIDTH, generator=generator)),
            Keys.OLD_LOG_PROBS: column.unpadded(-torch.rand(ROWS, WIDTH, generator=generator)),
            Keys.REF_LOG_PROB: column.unpadded(-torch.rand(ROWS, WIDTH, generator=generator)),
        },
        {Keys.UID: [f"p{row // SAMPLES}" for row in range(ROWS)], Keys.SOURCE: ["a", "a", "b", "b", "a", "a"]},
    )


def compute(whole: DataProto, algorithm: AlgorithmSpec, partition: Partition) -> tuple[dict[str, Tensor], list[Any]]:
    """Run all ranks, and put the rows back into order; copies get an empty mask, as in `Rows.pull`."""
    ranks = ThreadRanks(len(partition))

    def one(rank: int) -> DataProto:
        share = partition[rank]
        part = whole[list(share.rows)]
        given = as_sent(masked(part, sorted(share.padding)), algorithm)
        return compute_advantages(given, AdvantageSettings(algorithm, WIDTH), 0.1, ranks)

    with ThreadPoolExecutor(len(partition)) as pool:
        parts = list(pool.map(one, range(len(partition))))
    found = {key: torch.empty(ROWS, WIDTH) for key in (Keys.ADVANTAGES, Keys.RETURNS)}
    for share, part in zip(partition, parts, strict=True):
        for position, row in enumerate(share.rows):
            for key in found if position not in share.padding else ():
                found[key][row] = part.padded(key, WIDTH)[position]
    return found, [part.meta_info[Meta.METRICS] for part in parts]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("estimator", ESTIMATORS_OF_API)
def test_the_number_of_ranks_changes_nothing(estimator: str, num_ranks: int) -> None:
    algorithm = algorithm_of(estimator, lam=0.9, kl={"inReward": True, "estimator": "K1"})
    alone, [expected] = compute(batch(), algorithm, in_groups(ROWS, SAMPLES, 1))

    sharded, metrics = compute(batch(), algorithm, in_groups(ROWS, SAMPLES, num_ranks))

    for key, values in alone.items():
        torch.testing.assert_close(sharded[key], values)
    for of_rank in metrics:
        assert of_rank.keys() == expected.keys()
        for name, values in of_rank.items():
            assert values == pytest.approx(expected[name], abs=1e-6), name


def test_the_statistics_are_those_of_rows_and_tokens() -> None:
    whole = batch()
    _, [metrics] = compute(whole, AlgorithmSpec(), in_groups(ROWS, SAMPLES, 1))

    scores, values = whole.ragged(Keys.TOKEN_LEVEL_SCORES).sums(), whole.ragged(Keys.VALUES).values
    assert metrics["critic/score/mean"] == [pytest.approx(float(scores.mean()))]
    assert metrics["critic/score/min"] == [pytest.approx(float(scores.min()))]
    assert metrics["critic/values/max"] == [pytest.approx(float(values.max()))]
    assert metrics["critic/advantages/mean"] == [pytest.approx(0.0, abs=1e-6)], "they are whitened"
    assert "actor/reward_kl_penalty" not in metrics


def test_the_kl_penalty_is_in_the_rewards_and_not_in_the_scores() -> None:
    whole = batch()
    algorithm = AlgorithmSpec.model_validate({"kl": {"inReward": True, "estimator": "K1"}})

    _, [metrics] = compute(whole, algorithm, in_groups(ROWS, SAMPLES, 1))

    kl = whole.padded(Keys.OLD_LOG_PROBS) - whole.padded(Keys.REF_LOG_PROB)
    of_rows = whole.ragged(Keys.TOKEN_LEVEL_SCORES).sums() - 0.1 * kl.sum(dim=1)
    assert metrics["critic/rewards/mean"] == [pytest.approx(float(of_rows.mean()), abs=1e-6)]
    lengths = whole.ragged(Keys.RESPONSE_MASK).sums()
    assert metrics["actor/reward_kl_penalty"] == [pytest.approx(float((kl.sum(dim=1) / lengths).mean()), abs=1e-6)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_source_of_a_mixture_has_its_share_and_its_mean_score(num_ranks: int) -> None:
    """Four of six rows are of a, and none is of c; row 4 is dropped."""
    whole = masked(batch(), [4])
    settings = AdvantageSettings(algorithm_of("GAE"), WIDTH, sources=("a", "b", "c"))
    partition, ranks = in_groups(ROWS, SAMPLES, num_ranks), ThreadRanks(num_ranks)

    def one(rank: int) -> DataProto:
        share = partition[rank]
        return compute_advantages(masked(whole[list(share.rows)], sorted(share.padding)), settings, 0.1, ranks)

    with ThreadPoolExecutor(num_ranks) as pool:
        found = [part.meta_info[Meta.METRICS] for part in pool.map(one, range(num_ranks))]

    scores = batch().ragged(Keys.TOKEN_LEVEL_SCORES).sums()
    for metrics in found:
        mixture = {name: value for name, [value] in metrics.items() if name.startswith("mixture/")}
        assert mixture == {
            "mixture/a/share": pytest.approx(3 / 5),
            "mixture/b/share": pytest.approx(2 / 5),
            "mixture/c/share": 0.0,
            "mixture/a/score/mean": pytest.approx(float(scores[[0, 1, 5]].mean())),
            "mixture/b/score/mean": pytest.approx(float(scores[[2, 3]].mean())),
        }


def as_sent(batch: DataProto, algorithm: AlgorithmSpec) -> DataProto:
    """Return the columns that a rank gets with this algorithm; reading another one is an error."""
    reads = frozenset(READ_BY_ADVANTAGES) - unread_by_advantages(AdvantageSettings(algorithm, WIDTH))
    columns = {name: column for name, column in batch.items() if name in reads}
    return DataProto.of_columns(columns, {}, {Keys.VALUES, Keys.UID, Keys.OLD_LOG_PROBS} - reads)


def masked(whole: DataProto, rows: list[int]) -> DataProto:
    """Return the batch with an empty mask in these rows."""
    mask = whole.ragged(Keys.RESPONSE_MASK)
    kept = ~torch.isin(mask.row_of, torch.tensor(rows, dtype=torch.int64))
    return whole.with_fields({Keys.RESPONSE_MASK: mask.with_values(mask.values & kept)})


def without(dropped: list[int]) -> DataProto:
    """Return the batch as the reward leaves it that drops these rows: their mask is 0."""
    return masked(batch(), dropped)


@pytest.mark.parametrize("estimator", ESTIMATORS_OF_API)
@pytest.mark.parametrize("dropped", [[0, 1], [2, 3, 4, 5], [1], [0, 3, 5]], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_dropped_responses_count_nowhere(estimator: str, dropped: list[int], num_ranks: int) -> None:
    algorithm = algorithm_of(estimator, kl={"inReward": True})
    kept = [row for row in range(ROWS) if row not in dropped]

    found, metrics = compute(without(dropped), algorithm, in_groups(ROWS, SAMPLES, num_ranks))

    for values in found.values():
        assert values.isfinite().all()
        assert not values[dropped].any()
    for of_rank in metrics:
        assert all(math.isfinite(value) for values in of_rank.values() for value in values)
        scores = batch().ragged(Keys.TOKEN_LEVEL_SCORES).sums()[kept]
        assert of_rank["critic/score/mean"] == [pytest.approx(float(scores.mean()))]
    if dropped in ([0, 1], [2, 3, 4, 5]):
        # Whole groups are dropped: the others have the advantages of a batch without these.
        rows = batch()[kept]
        alone = compute_advantages(rows, AdvantageSettings(algorithm, WIDTH), 0.1, ThreadRanks(1))
        torch.testing.assert_close(found[Keys.ADVANTAGES][kept], alone.padded(Keys.ADVANTAGES, WIDTH))


@pytest.mark.parametrize("estimator", ["GRPO", "DrGRPO", "RLOO"])
def test_a_response_that_is_left_alone_in_its_group_learns_nothing(estimator: str) -> None:
    algorithm = algorithm_of(estimator)

    found, _ = compute(without([1]), algorithm, in_groups(ROWS, SAMPLES, 1))

    assert not found[Keys.ADVANTAGES][0].any()
    assert found[Keys.ADVANTAGES][2:].any()


def test_a_step_whose_responses_are_all_dropped_fails() -> None:
    with pytest.raises(RewardFunctionError, match="dropped all responses of the step"):
        compute(without(list(range(ROWS))), AlgorithmSpec(), in_groups(ROWS, SAMPLES, 1))


def test_the_penalty_of_length_is_in_the_rewards_and_not_in_the_scores() -> None:
    whole = batch()
    overlong = Overlong(max_length=WIDTH, buffer=2, factor=0.5)
    settings = AdvantageSettings(algorithm_of("ReinforcePlusPlus"), WIDTH, overlong)

    found = compute_advantages(whole, settings, 0.1, ThreadRanks(1))

    metrics = found.meta_info[Meta.METRICS]
    # The responses have 5, 2, 4, 1, 3 and 5 tokens.
    scores = whole.ragged(Keys.TOKEN_LEVEL_SCORES).sums().float()
    rewards = scores - torch.tensor([0.5, 0.0, 0.25, 0.0, 0.0, 0.5])
    assert metrics["critic/score/mean"] == [pytest.approx(float(scores.mean()))]
    assert metrics["critic/rewards/mean"] == [pytest.approx(float(rewards.mean()))]
    assert metrics["reward/overlong_penalty/mean"] == [pytest.approx(1.25 / 6)]
    torch.testing.assert_close(found.padded(Keys.RETURNS)[:, 0], rewards)
