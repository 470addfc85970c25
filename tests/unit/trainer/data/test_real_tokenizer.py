"""Prompts and rewards with a real HuggingFace tokenizer: no doubled special tokens, and a way there and back."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ppojob_trainer.data import PromptDataset, PromptLoader, PromptTokenizer
from ppojob_trainer.data.sources.reasoning_gym import ReasoningGymPrompts
from ppojob_trainer.protocol import DataProto, Keys, check_layout, rollout_batch
from ppojob_trainer.rewards import Scorer, load_reward_function
from ppojob_trainer.rewards.batch import score_batch

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
    dataset = PromptDataset(source, PromptTokenizer(tokenizer, "Answer with the result only."), 200)
    ids = dataset.batch([0]).array(Keys.PROMPT_IDS)[0]
    assert [token for token in ids if token < 5] == [BOS, SYSTEM, USER, ASSISTANT]
    assert ids[-1] == ASSISTANT
    assert tokenizer.unk_token_id not in ids


def test_without_a_template_the_tokenizer_adds_its_begin_token(source) -> None:
    ids = PromptDataset(source, PromptTokenizer(make_tokenizer(None)), 200).batch([0]).array(Keys.PROMPT_IDS)[0]
    assert [token for token in ids if token < 5] == [BOS]


def test_from_the_source_to_token_level_scores(source) -> None:
    tokenizer = make_tokenizer(TEMPLATE)
    prompts = PromptLoader(PromptDataset(source, PromptTokenizer(tokenizer), 200), 8, seed=1).next_batch()
    answers = [truth if row % 2 else "no idea" for row, truth in enumerate(prompts.array(Keys.GROUND_TRUTH))]
    responses = [[*tokenizer(answer, add_special_tokens=False)["input_ids"], END] for answer in answers]
    batch = prompts.union(
        DataProto.from_dict(rollout_batch(prompts.array(Keys.PROMPT_IDS).tolist(), responses, pad_token_id=END))
    )
    function = load_reward_function(module="ppojob_trainer.rewards.reasoning_gym", extract="last_number")
    batch = batch.union(score_batch(batch, Scorer(function, num_threads=2), tokenizer))
    check_layout(batch)
    scores = batch.tensor(Keys.TOKEN_LEVEL_SCORES)
    assert scores.sum(dim=1).tolist() == [0, 1] * 4
    ends = batch.tensor(Keys.RESPONSE_MASK).sum(dim=1) - 1
    assert scores.gather(1, ends.unsqueeze(1)).flatten().tolist() == [0, 1] * 4
