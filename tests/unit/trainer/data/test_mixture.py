"""Batches of a mixture of sources: order, epochs, resuming, and what a prompt carries."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from ppojob_trainer.data import DataError, PromptLoader, PromptRecord, WeightedDataset
from ppojob_trainer.data.dataset import PromptDataset
from ppojob_trainer.data.tokenize import PromptTokenizer
from ppojob_trainer.data.tokens import TokenizedPrompts
from ppojob_trainer.protocol import DataProto, Keys
from tests.unit.trainer.data.test_prompt_dataset import Source, Words

# Prompts of each source, and its weight.
SIZES = {"sums": (7, 0.5), "gcd": (3, 0.3), "words": (10, 0.2)}
PROMPTS = sum(size for size, _ in SIZES.values())


def dataset(count: int, max_length: int = 100) -> PromptDataset:
    tokenizer = PromptTokenizer(Words())
    source = Source(count)
    return PromptDataset(source, tokenizer, TokenizedPrompts.of(source, tokenizer), max_length, "Filter")


def mixture(**sizes: tuple[int, float]) -> list[WeightedDataset]:
    return [WeightedDataset(dataset(size), name, weight) for name, (size, weight) in (sizes or SIZES).items()]


def loader(batch: int = 4, **settings: Any) -> PromptLoader:
    return PromptLoader(mixture(), batch, **{"seed": 5, **settings})


def uids(batches: Iterator[DataProto] | list[DataProto]) -> list[str]:
    return [uid for batch in batches for uid in batch.array(Keys.UID).tolist()]


def sources(batches: list[DataProto]) -> list[str]:
    return [source for batch in batches for source in batch.array(Keys.SOURCE).tolist()]


def test_the_prompts_of_a_batch_come_by_weight() -> None:
    found = sources([loader(batch=10).next_batch()])

    # As in test_apportionment.
    assert found == [list(SIZES)[source] for source in (0, 1, 0, 2, 0, 1, 0, 1, 0, 2)]


def test_a_prompt_carries_its_source() -> None:
    batch = loader(shuffle=False).next_batch()

    assert batch.array(Keys.UID).tolist() == ["sums-0-0", "gcd-0-0", "sums-0-1", "words-0-0"]
    assert batch.array(Keys.INDEX).tolist() == [0, 0, 1, 0]
    assert batch.array(Keys.EXTRA_INFO).tolist()[1] == {"i": 0, "mixture_source": "gcd"}
    assert batch.array(Keys.DATA_SOURCE).tolist() == ["source"] * 4


def test_the_dictionary_of_the_row_is_not_changed() -> None:
    info = {"i": 0}

    class Shared(Source):
        def __getitem__(self, index: int) -> PromptRecord:
            return PromptRecord("w", "source", extra_info=info)

    source, tokenizer = Shared(2), PromptTokenizer(Words())
    both = [
        WeightedDataset(PromptDataset(source, tokenizer, TokenizedPrompts.of(source, tokenizer), 9), name)
        for name in ("a", "b")
    ]
    batch = PromptLoader(both, 2).next_batch()

    assert batch.array(Keys.EXTRA_INFO)[0] == {"i": 0, "mixture_source": "a"}
    assert info == {"i": 0}


def test_an_epoch_has_as_many_prompts_as_all_sources() -> None:
    mixed = loader(batch=6)

    assert mixed.steps_per_epoch == PROMPTS // 6 == 3
    assert [mixed.next_batch().meta_info["epoch"] for _ in range(7)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_source_that_is_exhausted_begins_again_in_another_order() -> None:
    """gcd has 3 prompts, and gives 6 of the first 20."""
    of_gcd = [uid for uid in uids([loader(batch=20).next_batch()]) if uid.startswith("gcd")]

    first, second = of_gcd[:3], of_gcd[3:]
    assert sorted(first) == ["gcd-0-0", "gcd-0-1", "gcd-0-2"]
    assert sorted(second) == ["gcd-1-0", "gcd-1-1", "gcd-1-2"]


def test_the_prompts_that_fill_no_batch_are_left_out_of_their_sources() -> None:
    """20 prompts are three batches of 6 and 2 others."""
    mixed, whole = loader(batch=6), loader(batch=20)
    kept = uids([mixed.next_batch() for _ in range(6)])

    everything = uids([whole.next_batch() for _ in range(2)])
    assert kept == everything[:18] + everything[20:38]


def test_the_order_of_a_source_depends_only_on_its_name_and_the_seed() -> None:
    def order(of: str, *given: WeightedDataset, seed: int = 5) -> list[str]:
        found = PromptLoader(given, 10, seed=seed)
        return [uid for uid in uids([found.next_batch() for _ in range(20)]) if uid.startswith(of)][:10]

    a, b, c = (WeightedDataset(dataset(10), name) for name in "abc")
    assert order("a", a, b) == order("a", c, a) == order("a", WeightedDataset(dataset(10), "a", 3.0), b)
    assert order("a", a, b) != order("a", a, b, seed=6)
    of_a, of_b = ([uid[1:] for uid in order(name, a, b)] for name in "ab")
    assert of_a != of_b


def test_the_order_is_pinned() -> None:
    # A change here would make running jobs repeat and skip prompts after an upgrade.
    assert uids([loader(batch=12).next_batch()]) == PINNED


@pytest.mark.parametrize("batch", [1, 4, 6])
def test_a_run_that_is_resumed_after_any_prompt_draws_those_of_one_that_was_not(batch: int) -> None:
    """Over three epochs of the mixture, in which gcd is passed six times."""
    counts = [*range(1, 3 * PROMPTS, 7)]
    for before in range(2 * PROMPTS):
        undisturbed, stopped, resumed = loader(batch), loader(batch), loader(batch)
        for mixed in (undisturbed, stopped):
            for _ in range(before):
                mixed.next_batch(1)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))

        expected = [
            undisturbed.next_batch(count) for count in (None, 3, None, None, counts[before % len(counts)], None)
        ]
        found = [resumed.next_batch(count) for count in (None, 3, None, None, counts[before % len(counts)], None)]
        assert uids(found) == uids(expected)
        assert [each.meta_info for each in found] == [each.meta_info for each in expected]


def test_resuming_with_another_batch_size_repeats_nothing() -> None:
    first, second = loader(batch=4), loader(batch=5)
    seen = [first.next_batch() for _ in range(5)]
    second.load_state_dict(first.state_dict())

    seen += [second.next_batch() for _ in range(4)]
    assert max(Counter(uids(seen)).values()) == 1


def test_prompts_that_are_filtered_are_not_counted() -> None:
    """Prompt i has i + 3 tokens: 5 prompts of `long` are short enough."""
    given = [WeightedDataset(dataset(10, max_length=7), "long"), WeightedDataset(dataset(5), "short")]
    mixed = PromptLoader(given, 5, seed=1)
    batches = [mixed.next_batch() for _ in range(4)]

    assert mixed.steps_per_epoch == 2
    assert Counter(sources(batches)) == {"long": 10, "short": 10}
    of_long = [uid for uid in uids(batches) if uid.startswith("long")]
    assert sorted(of_long[:5]) == [f"long-0-{index}" for index in range(5)]
    assert sorted(of_long[5:]) == [f"long-1-{index}" for index in range(5)]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (mixture(sums=(7, 0.5), gcd=(3, 0.3)), r"name of the sources = \['sums', 'gcd', 'words'\], now it is"),
        (
            mixture(sums=(8, 0.5), gcd=(3, 0.3), words=(10, 0.2)),
            r"num_prompts .* = \[7, 3, 10\], now it is \[8, 3, 10\]",
        ),
        (mixture(sums=(7, 0.4), gcd=(3, 0.3), words=(10, 0.2)), r"weight .* = \[0.5, 0.3, 0.2\], now it is \[0.4,"),
    ],
)
def test_another_mixture_is_refused(other: list[WeightedDataset], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PromptLoader(other, 4, seed=5).load_state_dict(loader().state_dict())


def test_the_position_of_an_older_version_is_refused() -> None:
    with pytest.raises(DataError, match="now it is"):
        loader().load_state_dict({"epoch": 0, "position": 4, "seed": 5, "shuffle": True, "num_prompts": 20})


def test_too_few_prompts_in_all_sources() -> None:
    with pytest.raises(DataError, match=r"20 prompts cannot fill a batch of data\.trainBatchSize 21"):
        loader(batch=21)


def test_a_source_that_a_batch_repeats_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loader(batch=10)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        loader(batch=20)
    assert "source gcd of the mixture has 3 prompts, and a batch needs about 6: it repeats some of them" in caplog.text
    assert "source words" not in caplog.text


PINNED = [
    "sums-0-4",
    "gcd-0-1",
    "sums-0-6",
    "words-0-5",
    "sums-0-1",
    "gcd-0-2",
    "sums-0-5",
    "gcd-0-0",
    "sums-0-0",
    "words-0-1",
    "sums-0-3",
    "gcd-1-2",
]
