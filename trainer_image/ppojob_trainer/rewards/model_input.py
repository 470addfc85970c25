"""The input of a reward model: prompt and response as token ids of its vocabulary.

Called by the reward model's workers. The response comes as text, because the policy may have another vocabulary and
chat template; the text has none of the policy's special tokens. Inputs that are too long are truncated on the left,
because the response is at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ppojob_api.v1alpha1.model import RewardInput
from ppojob_trainer.rewards.errors import RewardModelError

__all__ = ["ModelInput", "Tokenizer"]

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """The part of a HuggingFace tokenizer that is needed here."""

    chat_template: Any
    model_max_length: int
    truncation_side: str

    def __call__(self, text: list[str], **options: Any) -> Any:
        """Return a mapping with `input_ids`, one list for each text."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return the text of a conversation."""
        ...


class ModelInput:
    """Turns prompts and responses into what one reward model reads."""

    def __init__(self, tokenizer: Tokenizer, kind: RewardInput, max_length: int | None) -> None:
        """
        Args:
            tokenizer: the reward model's.
            max_length: longest input in tokens; None: no limit but the tokenizer's own.

        Raises:
            RewardModelError: `kind` is Chat and the tokenizer has no chat template.
        """
        if kind is RewardInput.CHAT and not tokenizer.chat_template:
            raise RewardModelError(
                "model.reward.input is Chat, but the reward model's tokenizer has no chat template: use Text, or put "
                "a template into its folder"
            )
        if kind is RewardInput.AUTO:
            kind = RewardInput.CHAT if tokenizer.chat_template else RewardInput.TEXT
        self.kind = kind
        # A tokenizer that knows no limit has a huge number there.
        self.max_length = min(tokenizer.model_max_length, math.inf if max_length is None else max_length)
        self._tokenizer = tokenizer
        self._tokenizer.truncation_side = "left"

    def token_ids(
        self, prompts: Sequence[Sequence[Message]], responses: Sequence[str], indices: Sequence[Any]
    ) -> list[list[int]]:
        """Return the token ids of each input, without padding; at least one token each.

        Args:
            prompts: chat messages of each prompt.
            indices: of the prompts in their data, for messages.

        Raises:
            RewardModelError: the chat template refuses a conversation; names its prompt.
        """
        texts = [self._text(*row) for row in zip(prompts, responses, indices, strict=True)]
        options: dict[str, Any] = {}
        if self.max_length < 1e9:
            options = {"truncation": True, "max_length": int(self.max_length)}
        # The template writes the special tokens itself; a second begin-of-sequence token would be a silent error.
        encoded = self._tokenizer(texts, add_special_tokens=self.kind is not RewardInput.CHAT, **options)
        # An empty response alone may have no token at all; a model needs one.
        return [list(ids) or [0] for ids in encoded["input_ids"]]

    def _text(self, prompt: Sequence[Message], response: str, index: Any) -> str:
        if self.kind is RewardInput.RESPONSE:
            return response
        if self.kind is RewardInput.TEXT:
            return "\n".join([*(str(message["content"]) for message in prompt), response])
        conversation = [*map(dict, prompt), {"role": "assistant", "content": response}]
        try:
            return str(self._tokenizer.apply_chat_template(conversation, tokenize=False))
        except Exception as error:  # a template is code of the checkpoint's and raises what it likes
            raise RewardModelError(
                f"the reward model's chat template refuses the conversation of prompt {index}: {error}. Set "
                "model.reward.input: Text, or change the prompt's messages"
            ) from error
