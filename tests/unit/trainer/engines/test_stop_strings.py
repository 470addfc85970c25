"""Stop strings are found at the token at which vLLM finds them, for tokenizers of both kinds that are known."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ppojob_trainer.engines.rollout.stop_strings import StopStrings, is_known, token_texts

TEXTS = [
    "Therefore the answer is <answer>42</answer>.\n\nThus, the the end.",
    "Größe, naïve façade — “quotes” … 答案是四十二。 Ответ 🙂 is 17</answer>\n",
    "if (a > b) { return a; }\n\n\nelse { return b; }",
]
STOPS = [
    ["</answer>"],
    ["\n\n"],
    ["the", " the ", "e"],
    ["是四", "🙂"],
    [">", "</answer>", "swer>"],
    [" "],
    ["nothing has this"],
    ["<tool>", "a<tool>b"],
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def with_byte_tokens(*, strips: bool) -> Tokenizer:
    """Return one like those of Llama 2 and Mistral (`strips`) or Gemma."""
    letters = [f"<0x{value:02X}>" for value in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>"], limit_alphabet=60)
    tokenizer.train_from_iterator([text[:40] for text in TEXTS] * 3, trainer)
    vocabulary = tokenizer.get_vocab()
    known = {**{letter: number for number, letter in enumerate(letters)}}
    known |= {token: len(letters) + number for token, number in vocabulary.items()}
    tokenizer.model = models.BPE(vocab=known, merges=[], byte_fallback=True, unk_token="<unk>")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strips else []))
    return tokenizer


def of_kind(kind: str) -> Any:
    tokenizer = byte_level() if kind == "bytes as letters" else with_byte_tokens(strips=kind == "bytes as tokens")
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("two words", special=False)])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


KINDS = ["bytes as letters", "bytes as tokens", "bytes as tokens, nothing stripped"]


def drawn(tokenizer: Any, chance: random.Random) -> list[int]:
    """Return tokens of texts, of which some are other tokens or end in the middle of a letter."""
    found: list[int] = []
    while len(found) < 120:
        part = tokenizer.encode(chance.choice(TEXTS), add_special_tokens=False)
        start = chance.randrange(len(part))
        found += part[start : start + chance.randint(1, 12)]
        if chance.random() < 0.3:
            # The last three were added.
            found.append(len(tokenizer) - 1 - chance.choice([0, 1, 2, chance.randrange(len(tokenizer))]))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_tokens_add_up_to_that_of_the_tokenizer(kind: str) -> None:
    tokenizer, chance = of_kind(kind), random.Random(1)
    texts = token_texts(tokenizer)
    assert is_known(tokenizer)
    # A stripped space is that of the first token of a text.
    first = tokenizer.encode("a", add_special_tokens=False)
    for text in TEXTS:
        tokens = first + tokenizer.encode(text, add_special_tokens=False)
        expected = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert b"".join(texts[token] for token in tokens).decode() == expected
    for token in (chance.randrange(len(tokenizer)) for _ in range(300)):
        expected = tokenizer.decode([*first, token], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        joined = b"".join(texts[one] for one in [*first, token])
        assert joined.decode(errors="replace") == expected or b"\xef\xbf\xbd" in expected.encode()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_a_response_ends_where_vllm_ends_it(kind: str, stops: list[str]) -> None:
    tokenizer = of_kind(kind)
    strings, num_ended, num_compared = StopStrings(stops, token_texts(tokenizer)), 0, 0
    for seed in range(60):
        tokens = drawn(tokenizer, random.Random(seed))
        expected = ended_by_vllm(tokenizer, tokens, stops)
        if expected == LOST:
            continue
        found = next(
            ((number, string) for number in range(1, len(tokens) + 1) if (string := strings.ended_by(tokens[:number]))),
            None,
        )
        assert found == expected, f"seed {seed}"
        num_ended += expected is not None
        num_compared += 1
    assert num_compared > 20
    assert bool(num_ended) == (stops != ["nothing has this"])


LOST = (0, "")


def ended_by_vllm(tokenizer: Any, tokens: list[int], stops: list[str]) -> tuple[int, str] | None:
    """Return after how many tokens vLLM's front end ends a response, and by which string.

    LOST: it lost a part of the text, as with some bytes that are not UTF-8.
    """
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    request: Any = SimpleNamespace(
        request_id="one",
        prompt_token_ids=tokenizer.encode("a", add_special_tokens=False),
        sampling_params=SamplingParams(stop=stops),
    )
    detokenizer = FastIncrementalDetokenizer(tokenizer, request)
    stream = detokenizer.stream
    for number, token in enumerate(tokens, 1):
        string = detokenizer.update([token], stop_terminated=False)
        if detokenizer.stream is not stream:
            return LOST
        if string is not None:
            return number, string
    return None


def test_a_tokenizer_whose_text_depends_on_neighbours_is_not_known() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    assert not is_known(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert not is_known(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert not is_known(object())


def test_a_token_beyond_the_tokenizers_has_no_text() -> None:
    strings = StopStrings(["ab"], [b"a", b"b"])
    assert strings.ended_by([0, 7, 1]) == "ab"
    assert strings.ended_by([0, 7]) is None
