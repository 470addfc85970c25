"""What a reward model reads, in its own vocabulary and template."""

from __future__ import annotations

from typing import Any

import pytest

from ppojob_api.v1alpha1.model import RewardInput
from ppojob_trainer.rewards.errors import RewardModelError
from ppojob_trainer.rewards.model_input import ModelInput

PROMPTS = [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]]


class Characters:
    """A tokenizer of characters with a begin token 1; its template writes the begin token as `^`."""

    truncation_side = "right"

    def __init__(self, chat_template: str | None = None, model_max_length: int = 10**30) -> None:
        self.chat_template = chat_template
        self.model_max_length = model_max_length

    def __call__(self, text: list[str], **options: Any) -> Any:
        rows = [[1 if character == "^" else ord(character) for character in one] for one in text]
        if options["add_special_tokens"]:
            rows = [[1, *row] for row in rows]
        if options.get("truncation"):
            assert self.truncation_side == "left"
            rows = [row[-options["max_length"] :] for row in rows]
        return {"input_ids": rows}

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        assert options == {"tokenize": False}
        if conversation[0]["role"] == self.chat_template:
            raise ValueError("system role not supported")
        return "^" + "".join(f"[{message['role'][0]}]{message['content']}" for message in conversation)


def read(kind: RewardInput, tokenizer: Characters, response: str = "Yo", max_length: int | None = None) -> str:
    (tokens,) = ModelInput(tokenizer, kind, max_length).token_ids(PROMPTS, [response], [7])
    return "".join("^" if token == 1 else chr(token) for token in tokens)


@pytest.mark.parametrize(
    ("kind", "template", "expected"),
    [
        (RewardInput.AUTO, "any", "^[s]Be kind.[u]Hi[a]Yo"),
        (RewardInput.AUTO, None, "^Be kind.\nHi\nYo"),
        (RewardInput.CHAT, "any", "^[s]Be kind.[u]Hi[a]Yo"),
        (RewardInput.TEXT, "any", "^Be kind.\nHi\nYo"),
        (RewardInput.RESPONSE, "any", "^Yo"),
    ],
)
def test_each_kind_of_input_has_one_begin_token(kind: RewardInput, template: str | None, expected: str) -> None:
    assert read(kind, Characters(template)) == expected


@pytest.mark.parametrize(("own", "given", "longest"), [(10**30, 6, 6), (5, None, 5), (5, 6, 5)])
def test_inputs_that_are_too_long_keep_their_end(own: int, given: int | None, longest: int) -> None:
    shown = read(RewardInput.TEXT, Characters(model_max_length=own), max_length=given)
    assert shown == "^Be kind.\nHi\nYo"[-longest:]


def test_an_empty_response_has_a_token_all_the_same() -> None:
    tokenizer = Characters()
    kind = ModelInput(tokenizer, RewardInput.RESPONSE, None)
    tokenizer.__class__ = type("NoBegin", (Characters,), {"__call__": lambda *_, **__: {"input_ids": [[]]}})
    assert kind.token_ids(PROMPTS, [""], [7]) == [[0]]


def test_a_template_that_is_missing_or_refuses_is_named() -> None:
    with pytest.raises(RewardModelError, match=r"input is Chat, but .* has no chat template: use Text"):
        ModelInput(Characters(), RewardInput.CHAT, None)
    with pytest.raises(RewardModelError, match=r"refuses the conversation of prompt 7: system role not supported"):
        read(RewardInput.CHAT, Characters("system"))
