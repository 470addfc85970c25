"""Prompts to token ids and batches: chat template, overlong prompts, order, and resuming."""

import logging
from itertools import chain
from typing import Any

import pytest

from ppojob_trainer.data import (
    DataError,
    PromptDataset,
    PromptLoader,
    PromptRecord,
    PromptTokenizer,
    TokenizedPrompts,
    WeightedDataset,
)
from ppojob_trainer.protocol import Keys


class Words:
    """A tokenizer of one token per word; token 1 begins a text. A template only if asked for."""

    def __init__(self, chat_template: str | None = "yes") -> None:
        self.chat_template = chat_template

    def __call__(self, text, *, add_special_tokens):
        begin = [1] if add_special_tokens else []
        return {"input_ids": [begin + [len(word) + 10 for word in line.split()] for line in text]}

    def apply_chat_template(self, conversation, *, tokenize=True, add_generation_prompt=False, **kwargs):
        assert not tokenize
        text = " ".join(f"<{message['role']}> {message['content']}" for message in conversation)
        return text + (" <assistant>" if add_generation_prompt else "")


class Source:
    """Prompt i has i + 1 words."""

    name = "words"
    is_shared = False

    def __init__(self, count: int) -> None:
        self._count = count

    def identity(self) -> dict[str, Any]:
        return {"words": self._count}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> PromptRecord:
        return PromptRecord("w " * index + "w", "source", ground_truth=str(index), extra_info={"i": index})


def dataset_of(source, tokenizer: PromptTokenizer, max_length: int, overlong="Fail") -> PromptDataset:
    return PromptDataset(source, tokenizer, TokenizedPrompts.of(source, tokenizer), max_length, overlong)


def dataset(count: int = 10, max_length: int = 100, overlong="Fail", template: str | None = "yes") -> PromptDataset:
    return dataset_of(Source(count), PromptTokenizer(Words(template)), max_length, overlong)


class TestTokenizer:
    def test_a_string_is_a_user_message_after_the_system_prompt(self) -> None:
        tokenizer = PromptTokenizer(Words(), "Answer with the result only.")
        messages = tokenizer.messages(PromptRecord("2 + 2 ?", "s"), "here")
        assert messages == [
            {"role": "system", "content": "Answer with the result only."},
            {"role": "user", "content": "2 + 2 ?"},
        ]
        # <system> Answer with the result only. <user> 2 + 2 ? <assistant>
        assert tokenizer.token_ids([messages]) == [[18, 16, 14, 13, 16, 15, 16, 11, 11, 11, 11, 21]]

    def test_without_a_template_the_contents_stand_below_each_other(self) -> None:
        tokenizer = PromptTokenizer(Words(None), "Be short.")
        messages = tokenizer.messages(PromptRecord("2 + 2 ?", "s"), "here")
        assert tokenizer.token_ids([messages]) == [[1, 12, 16, 11, 11, 11, 11]]

    def test_two_system_messages_are_refused(self) -> None:
        record = PromptRecord([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "s")
        assert PromptTokenizer(Words()).messages(record, "here") == record.prompt
        with pytest.raises(DataError, match="here: the prompt has a system message already: leave systemPrompt empty"):
            PromptTokenizer(Words(), "c").messages(record, "here")

    def test_the_record_is_not_changed(self) -> None:
        record = PromptRecord([{"role": "user", "content": "b"}], "s")
        PromptTokenizer(Words(), "c").messages(record, "here")
        assert record.prompt == [{"role": "user", "content": "b"}]


def test_a_batch_has_all_fields() -> None:
    batch = dataset().batch([2, 0], epoch=3)
    assert batch.ragged(Keys.PROMPT_IDS).to_lists() == [[16, 11, 11, 11, 21], [16, 11, 21]]
    assert batch.array(Keys.RAW_PROMPT)[1] == [{"role": "user", "content": "w"}]
    assert batch.array(Keys.DATA_SOURCE).tolist() == ["source"] * 2
    assert batch.array(Keys.GROUND_TRUTH).tolist() == ["2", "0"]
    assert batch.array(Keys.EXTRA_INFO).tolist() == [{"i": 2}, {"i": 0}]
    assert batch.array(Keys.INDEX).tolist() == [2, 0]
    assert batch.array(Keys.UID).tolist() == ["3-2", "3-0"]
    assert batch.meta_info == {"epoch": 3}


class TestOverlong:
    # Prompt i has i + 3 tokens: two of the template and i + 1 words.
    def test_fail_names_index_and_length_at_once(self) -> None:
        with pytest.raises(
            DataError, match=r"words, prompt 4: 7 tokens, .* 6; 6 of 10 prompts are longer\. Raise it \(.* 12 tokens\)"
        ):
            dataset(10, max_length=6)

    def test_filter_leaves_them_out_and_says_so(self, caplog) -> None:
        with caplog.at_level(logging.WARNING):
            short = dataset(10, max_length=6, overlong="Filter")
        assert len(short) == 4
        assert "words: 6 of 10 prompts are too long and left out" in caplog.text
        assert [index for batch in short.batches(3) for index in batch.array(Keys.INDEX)] == [0, 1, 2, 3]

    def test_filter_that_leaves_nothing_is_an_error(self) -> None:
        with pytest.raises(DataError, match=r"all 10 prompts are longer than data\.maxPromptLength 2"):
            dataset(10, max_length=2, overlong="Filter")

    def test_truncate_keeps_the_end(self) -> None:
        batch = dataset(10, max_length=4, overlong="Truncate").batch([1, 9])
        assert batch.ragged(Keys.PROMPT_IDS).to_lists() == [[16, 11, 11, 21], [11, 11, 11, 21]]

    def test_truncate_says_how_many(self, caplog) -> None:
        with caplog.at_level(logging.WARNING):
            dataset(10, max_length=4, overlong="Truncate")
        assert "words: 8 of 10 prompts are longer than data.maxPromptLength 4" in caplog.text

    def test_more_prompts_than_one_block(self) -> None:
        assert len(dataset(2500, max_length=2402, overlong="Filter")) == 2400

    def test_a_prompt_without_tokens_is_refused(self) -> None:
        class Blank(Source):
            def __getitem__(self, index: int) -> PromptRecord:
                return PromptRecord(" ", "source")

        class NoBegin(Words):
            def __call__(self, text, *, add_special_tokens):
                return super().__call__(text, add_special_tokens=False)

        with pytest.raises(DataError, match="words, prompt 0: the prompt has no tokens"):
            dataset_of(Blank(1), PromptTokenizer(NoBegin(None)), 10)


def loader_of(only: PromptDataset, batch: int, **settings: Any) -> PromptLoader:
    return PromptLoader([WeightedDataset(only)], batch, **settings)


def indices(loader: PromptLoader, batches: int) -> list[list[int]]:
    return [loader.next_batch().array(Keys.INDEX).tolist() for _ in range(batches)]


class TestLoader:
    @pytest.mark.parametrize(("prompts", "batch", "steps"), [(12, 4, 3), (11, 4, 2), (4, 4, 1)])
    def test_an_epoch_has_as_many_steps_as_it_has_whole_batches(self, prompts: int, batch: int, steps: int) -> None:
        loader = loader_of(dataset(prompts), batch, seed=1)
        epochs = [loader.next_batch().meta_info["epoch"] for _ in range(steps + 1)]

        assert loader.steps_per_epoch == steps
        assert epochs == [0] * steps + [1]

    def test_each_epoch_has_its_own_order_and_drops_the_rest(self) -> None:
        loader = loader_of(dataset(10), 4, seed=1)
        first, second = indices(loader, 2), indices(loader, 2)
        for epoch in (first, second):
            assert len(set(chain.from_iterable(epoch))) == 8
        assert first != second
        assert loader.next_batch().meta_info["epoch"] == 2

    def test_counts_take_all_prompts_of_an_epoch_in_its_order(self) -> None:
        loader = loader_of(dataset(10), 4, seed=1)
        batches = [loader.next_batch(count) for count in (3, 6, 5, 2)]

        assert [(len(batch), batch.meta_info["epoch"]) for batch in batches] == [(3, 0), (6, 0), (1, 0), (2, 1)]
        found = [index for batch in batches[:3] for index in batch.array(Keys.INDEX).tolist()]
        [whole] = indices(loader_of(dataset(10), 10, seed=1), 1)
        assert found == whole

    def test_a_position_after_counts_is_resumed(self) -> None:
        loader, resumed = (loader_of(dataset(10), 4, seed=1) for _ in range(2))
        for count in (3, 6, 5):
            loader.next_batch(count)
        resumed.load_state_dict(loader.state_dict())

        for count in (2, 9):
            expected = loader.next_batch(count).array(Keys.UID).tolist()
            assert resumed.next_batch(count).array(Keys.UID).tolist() == expected

    def test_the_order_is_pinned(self) -> None:
        # A change here would make running jobs repeat and skip prompts after an upgrade.
        assert indices(loader_of(dataset(10), 5, seed=1), 2) == PINNED

    def test_the_seed_decides(self) -> None:
        orders = [indices(loader_of(dataset(10), 5, seed=seed), 4) for seed in (1, 1, 2)]
        assert orders[0] == orders[1] != orders[2]

    def test_without_shuffling_the_order_is_that_of_the_source(self) -> None:
        loader = loader_of(dataset(5), 2, shuffle=False)
        assert indices(loader, 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]

    def test_the_epoch_is_in_the_batch(self) -> None:
        loader = loader_of(dataset(4), 2, seed=1)
        assert [loader.next_batch().meta_info["epoch"] for _ in range(5)] == [0, 0, 1, 1, 2]

    @pytest.mark.parametrize("seen", range(7))
    def test_resuming_continues_where_it_stopped(self, seen: int) -> None:
        loader = loader_of(dataset(10), 3, seed=5)
        expected = indices(loader, 12)
        first, second = (loader_of(dataset(10), 3, seed=5) for _ in range(2))
        indices(first, seen)
        second.load_state_dict(first.state_dict())
        assert indices(second, 12 - seen) == expected[seen:]

    def test_resuming_with_another_batch_size_repeats_nothing(self) -> None:
        first, second = loader_of(dataset(12), 4, seed=5), loader_of(dataset(12), 2, seed=5)
        seen = indices(first, 2)
        second.load_state_dict(first.state_dict())
        assert sorted(chain.from_iterable(seen + indices(second, 2))) == list(range(12))

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (
                lambda: loader_of(dataset(11), 2, seed=5),
                r"the checkpoint's data has num_prompts of the sources = \[10\], now it is \[11\]",
            ),
            (lambda: loader_of(dataset(10), 2, seed=6), "seed = 5, now it is 6"),
            (lambda: loader_of(dataset(10), 2, seed=5, shuffle=False), "shuffle = True, now it is False"),
        ],
    )
    def test_other_data_is_refused(self, other, message) -> None:
        state = loader_of(dataset(10), 2, seed=5).state_dict()
        with pytest.raises(DataError, match=message):
            other().load_state_dict(state)

    def test_a_batch_that_fails_is_not_counted(self, monkeypatch) -> None:
        loader = loader_of(dataset(4), 2, shuffle=False)
        assert indices(loader, 1) == [[0, 1]]
        readable = Source.__getitem__

        def unreadable(source: Source, index: int) -> PromptRecord:
            raise DataError(f"prompt {index} cannot be read")

        monkeypatch.setattr(Source, "__getitem__", unreadable)
        with pytest.raises(DataError, match="prompt 2"):
            loader.next_batch()
        monkeypatch.setattr(Source, "__getitem__", readable)
        assert loader.state_dict()["sources"][0]["drawn"] == 2
        assert indices(loader, 1) == [[2, 3]]

    def test_too_little_data(self) -> None:
        with pytest.raises(DataError, match=r"3 prompts cannot fill a batch of data\.trainBatchSize 4"):
            loader_of(dataset(3), 4)


PINNED = [[2, 9, 8, 3, 6], [7, 1, 4, 0, 5]]
