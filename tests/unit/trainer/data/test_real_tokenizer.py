"""Prompts and rewards with a real HuggingFace tokenizer: no doubled special tokens, and a way there and back."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ppojob_trainer.data import DataError, PromptLoader, PromptTokenizer, WeightedDataset
from ppojob_trainer.data.sources.reasoning_gym import ReasoningGymPrompts
from ppojob_trainer.protocol import Keys, check_layout, rollout_batch
from ppojob_trainer.rewards import FunctionSource, Scorer
from ppojob_trainer.rewards.batch import score_batch
from tests.unit.trainer.data.test_prompt_dataset import dataset_of

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOS, END, SYSTEM, USER, ASSISTANT = range(5)


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Characters as tokens, with a begin token that the tokenizer adds by itself."""
    special = ["<s>", "</s>", "<system>", "<user>", "<assistant>"]
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: number for number, token in enumerate([*special, *characters, "<unk>"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": special[2:]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def source() -> ReasoningGymPrompts:
    return ReasoningGymPrompts("chain_sum", 32, 1, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})


def test_a_template_brings_its_own_special_tokens(source) -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    dataset = dataset_of(source, PromptTokenizer(tokenizer, "Answer with the result only."), 200)
    ids = dataset.batch([0]).ragged(Keys.PROMPT_IDS).to_lists()[0]
    assert [token for token in ids if token < 5] == [BOS, SYSTEM, USER, ASSISTANT]
    assert ids[-1] == ASSISTANT
    assert tokenizer.unk_token_id not in ids


def test_without_a_template_the_tokenizer_adds_its_begin_token(source) -> None:
    ids = (
        dataset_of(source, PromptTokenizer(make_tokenizer(None)), 200).batch([0]).ragged(Keys.PROMPT_IDS).to_lists()[0]
    )
    assert [token for token in ids if token < 5] == [BOS]


THINKING = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if not enable_thinking %}<assistant>{% endif %}"


def test_a_template_of_the_job_replaces_the_tokenizers(source) -> None:
    for own in (TEMPLATE, None):
        prompts = PromptTokenizer(make_tokenizer(own), "", THINKING)
        ids = dataset_of(source, prompts, 200).batch([0]).ragged(Keys.PROMPT_IDS).to_lists()[0]
        assert [token for token in ids if token < 5] == [ASSISTANT]


def test_variables_reach_the_template(source) -> None:
    ids = [
        dataset_of(source, PromptTokenizer(make_tokenizer(THINKING), "", None, {"enable_thinking": value}), 200)
        .batch([0])
        .ragged(Keys.PROMPT_IDS)
        .to_lists()[0]
        for value in (False, True)
    ]
    assert ids[0] == [*ids[1], ASSISTANT]


def test_variables_that_are_not_the_jobs_to_give_are_refused() -> None:
    with pytest.raises(DataError, match=r"data\.chatTemplateKwargs: tokenize cannot be set here: remove it"):
        PromptTokenizer(make_tokenizer(TEMPLATE), "", None, {"tokenize": True})
    with pytest.raises(DataError, match="the actor's tokenizer has no chat template: set chatTemplate"):
        PromptTokenizer(make_tokenizer(None), "", None, {"enable_thinking": True})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "the chat template fails at .*TemplateSyntaxError"),
        ("{{ raise_exception('no system message') }}", "TemplateError: no system message"),
    ],
)
def test_a_template_that_fails_is_named(source, template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataset_of(source, PromptTokenizer(make_tokenizer(None), "", template), 200)


def test_from_the_source_to_token_level_scores(source) -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    dataset = dataset_of(source, PromptTokenizer(tokenizer), 200)
    prompts = PromptLoader([WeightedDataset(dataset)], 8, seed=1).next_batch()
    answers = [truth if row % 2 else "no idea" for row, truth in enumerate(prompts.array(Keys.GROUND_TRUTH))]
    responses = [[*tokenizer(answer, add_special_tokens=False)["input_ids"], END] for answer in answers]
    batch = prompts.with_fields(rollout_batch(prompts.ragged(Keys.PROMPT_IDS).to_lists(), responses))
    scorer = Scorer(FunctionSource("ppojob_trainer.rewards.reasoning_gym", extract="last_number"), concurrency=2)
    scorer.start(["reasoning_gym/chain_sum"])
    scores = score_batch(batch, scorer, tokenizer).scores
    scorer.close()
    check_layout(batch.with_fields({Keys.TOKEN_LEVEL_SCORES: scores}))
    assert scores.sums().tolist() == [0, 1] * 4
    assert [row[-1] for row in scores.to_lists()] == [0, 1] * 4
